"""Several weighted functions, labels, turns, code, choices, reasoning-gym's tasks and the judge, in real processes."""

import dataclasses
import http.server
import json
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_reward_pool import make_prompt, make_sample, score_all

from jaxrl_ppo.pipeline.measures import validation_scores
from jaxrl_ppo.rewards import RewardError, RewardManager
from jaxrl_ppo.rewards.choices import multiple_choice
from jaxrl_ppo.schema.config import Config, SandboxFusionConfig
from jaxrl_ppo.schema.records import Turn

ROOT = Path(__file__).parents[2]

PARTS = """
    def short(data_source, solution_str, ground_truth, extra_info, limit=3):
        return {"score": float(len(solution_str) <= limit), "characters": len(solution_str)}
    async def later(data_source, solution_str, ground_truth, extra_info):
        return {"score": 10, "pred": solution_str[:1], "acc": True}
    def wrong(data_source, solution_str, ground_truth, extra_info):
        return None if solution_str == "none" else 1
"""


async def test_weighted_sum_with_each_part_logged(started, tokenizer, function_file):
    path = function_file(PARTS)
    functions = {
        "right": {},
        "short": {"path": path, "name": "short", "weight": 0.5, "reward_kwargs": {"limit": 1}},
        "later": {"path": path, "name": "later", "weight": -0.01},
    }
    async with started(functions=functions) as manager:
        samples = await score_all(manager, tokenizer, ["4", "so 4", "5"], make_prompt("arithmetic"))
        assert [sample.reward for sample in samples] == [np.float32(r) for r in (1 + 0.5 - 0.1, 0.9, 0.5 - 0.1)]
        assert samples[1].reward_parts == {
            "score": np.float32(0.9),
            "right": 1,
            "short": 0,
            "short/characters": 4,
            "later": 10,
            "later/acc": 1,
            "acc": 1,
        }
        assert samples[1].reward_labels == {"pred": "s", "later/pred": "s"}
        report = manager.batch_report("step 1")
        assert report["reward/right/mean"] == pytest.approx(2 / 3)
        assert report["reward/short/mean"] == pytest.approx(2 / 3)


async def test_a_part_that_fails_is_named(started, tokenizer, function_file):
    functions = {"right": {}, "odd": {"path": function_file(PARTS), "name": "wrong"}}
    async with started(functions=functions) as manager:
        samples = await score_all(manager, tokenizer, ["4", "none", "4"], make_prompt("arithmetic"))
        assert [sample.reward for sample in samples] == [2, 0, 2]
        assert (
            samples[1].reward_labels["failure"].startswith("type: reward.functions.odd: the reward function returned")
        )
    functions["odd"]["name"] = "nobody"
    with pytest.raises(RewardError, match=r"reward\.functions\.odd: .* has no 'nobody'"):
        async with started(functions=functions):
            pass


async def test_labels_give_the_majority_vote(started, tokenizer, function_file):
    """maj@4 of answers b, b, b, a of which only a is right: the mean over draws that a has the most votes of."""
    path = function_file("""
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return {"score": float(solution_str == ground_truth), "pred": solution_str}
    """)
    async with started(path) as manager:
        prompt = make_prompt(truth="a")
        samples = await score_all(manager, tokenizer, ["b", "b", "b", "a"], prompt)
    other = dataclasses.replace(samples[0], reward_labels={}, reward_parts={"score": 0.0})
    prompts = [prompt] * 4 + [dataclasses.replace(prompt, ordinal=8, data_source="other")]
    metrics = validation_scores(prompts, [*samples, other])
    drawn = np.random.RandomState(42).choice(4, (1000, 4), replace=True)
    right = (drawn == 3).sum(axis=1)
    tie = np.array([votes == 2 and row[0] == 3 for votes, row in zip(right, drawn)])
    assert metrics["val-core/mine/reward/maj@4/mean"] == pytest.approx(((right > 2) | tie).mean())
    assert metrics["val-core/other/reward/mean@1"] == 0


async def test_turns_are_told_to_the_function(started, tokenizer):
    path = str(ROOT / "examples/rewards/uses_tool.py")
    async with started(functions={"tool": {"path": path}}) as manager:
        for answer, reward in (("5", 1.0), ("error: no", 0.5)):
            texts = ["call", answer, "done"]
            sample = make_sample(tokenizer, "".join(texts))
            ends = np.cumsum([len(tokenizer(text)["input_ids"]) for text in texts])
            starts = [0, *ends[:-1]]
            sample.turns = tuple(
                Turn(role, s, e) for role, s, e in zip(("assistant", "tool", "assistant"), starts, ends)
            )
            await manager.score(make_prompt(), sample)
            assert sample.reward == reward
        (single,) = await score_all(manager, tokenizer, ["5"])
        assert single.reward == 0


ECHO = """```python
for _ in range(int(input())):
    print(sum(map(int, input().split())))
```"""
TESTS = json.dumps({"inputs": ["1\n1 2\n", "2\n3 4\n5 6\n", "0\n"], "outputs": ["3", "7\n11\n", "4"]})
FUNCTION = "```python\nclass Solution:\n    def add(self, a, b):\n        print('noise')\n        return [a + b]\n```"
FUNCTION_TESTS = json.dumps({"fn_name": "add", "inputs": ["1\n2", "3\n4"], "outputs": ["[3]", [8]]})
HOSTILE = {
    "hangs": "while True: pass",
    "sleeps": "import time; time.sleep(100)",
    "grows": "x = 'x' * (2 << 30)",
    "exits": "import os; print(7); os._exit(3)",
    "floods": "while True: print('7' * 4096)",
    "forks": "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])",
}


async def test_code_runs_locally_when_it_is_allowed(started, tokenizer, monkeypatch):
    from jaxrl_ppo.rewards import manager as module

    runner = module.CodeRunner
    monkeypatch.setattr(module, "CodeRunner", lambda *a: dataclasses.replace(runner(*a), seconds=1))
    async with started(run_code_locally=True, num_workers=2, sources={"code/mine"}) as manager:
        (sample, none) = await score_all(manager, tokenizer, [ECHO, "no code"], make_prompt("code/mine", TESTS))
        assert (sample.reward, sample.reward_parts["acc"]) == (np.float32(2 / 3), 0)
        assert (none.reward, none.reward_parts["found"]) == (0, 0)
        (sample,) = await score_all(manager, tokenizer, [FUNCTION], make_prompt("taco", FUNCTION_TESTS))
        assert sample.reward == 0.5
        one = json.dumps({"inputs": [""], "outputs": ["7"]})
        programs = [f"```python\n{body}\n```" for body in HOSTILE.values()]
        samples = await score_all(manager, tokenizer, programs, make_prompt("apps", one))
        assert [sample.reward for sample in samples] == [0] * len(programs)
        assert manager.batch_report("step 1")["reward/failures"] == 0


async def test_code_does_not_run_unless_it_is_allowed(started, tokenizer):
    async with started(max_failure_rate=1.0) as manager:
        (sample,) = await score_all(manager, tokenizer, [ECHO], make_prompt("apps", TESTS))
        assert "running the model's code is off" in sample.reward_labels["failure"]


@pytest.fixture
def service():
    """A local HTTP service: answers each POST with what `answer(body)` gives; `bodies` are what it was sent."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append(body)
            data = json.dumps(server.answer(body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies = []
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


async def test_code_at_a_sandbox_service(started, tokenizer, service):
    """The service's request and answer have the fields of Sandbox Fusion's run_code."""

    def answer(body):
        if "broken" in body["code"]:
            return {"status": "SandboxError", "message": "no room"}
        result = {"status": "Finished", "return_code": 0, "stdout": body["stdin"].split()[-1]}
        return {"status": "Success", "run_result": result}

    service.answer = answer
    sandbox = SandboxFusionConfig(url=f"{service.url}/run_code", memory_limit_mb=77)
    truth = json.dumps({"inputs": ["a 1", "b 2"], "outputs": ["1", "3"]})
    programs = ["```python\nx\n```", "```python\nbroken\n```"]
    async with started(sandbox_fusion=sandbox) as manager:
        right, broken = await score_all(manager, tokenizer, programs, make_prompt("apps", truth))
    assert right.reward == 0.5
    assert "failed: no room" in broken.reward_labels["failure"]
    body = next(body for body in service.bodies if body["stdin"] == "a 1")
    assert (body["language"], body["memory_limit_MB"], body["code"]) == ("python", 77, "x\n")


async def test_the_judge_example_grades_through_an_openai_compatible_endpoint(started, tokenizer, service):
    def answer(body):
        text = body["messages"][0]["content"]
        said = "Good.\nGrade: 7.5" if "fine answer" in text else "I will not."
        return {"choices": [{"message": {"role": "assistant", "content": said}}]}

    service.answer = answer
    arguments = {"base_url": f"{service.url}/v1", "model": "m"}
    async with started(str(ROOT / "examples/rewards/judge.py"), arguments=arguments) as manager:
        fine, bad = await score_all(manager, tokenizer, ["fine answer", "other"], make_prompt(truth="the truth"))
    assert (fine.reward, fine.reward_labels["judgement"]) == (0.75, "Good.\nGrade: 7.5")
    assert "the judge gave no grade: 'I will not.'" in bad.reward_labels["failure"]
    assert service.bodies[0]["model"] == "m"
    assert "the truth" in service.bodies[0]["messages"][0]["content"]


ASKING = """
    def one(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer):
        return {"score": float(len(reward_model_tokenizer.encode("a b"))), "pred": reward_router_address}
    def each(data_sources, solution_strs, ground_truths, extra_infos, **further):
        return [{"score": 2.0, "pred": further["reward_router_address"]} for _ in data_sources]
"""


class OneServer:
    """The servers of a judge, as the run has them: here one, at a service's address."""

    def __init__(self, url):
        self.address = url.removeprefix("http://")

    async def ask(self, call):
        return await call(self.address)


@pytest.mark.parametrize("batch", [False, True])
async def test_functions_get_the_address_of_a_served_judge_and_its_tokenizer(
    tokenizer, service, function_file, smollm2, batch
):
    """By verl's names, in a weighted sum as elsewhere; the example asks there without being told a model."""
    service.answer = lambda body: {"choices": [{"message": {"content": f"Grade: {4 if 'model' in body else 8}"}}]}
    path = function_file(ASKING)
    config = Config()
    if batch:
        config.reward.reward_manager.name = "batch"
        config.reward.custom_reward_function.path, config.reward.custom_reward_function.name = path, "each"
    else:
        judge = str(ROOT / "examples/rewards/judge.py")
        config.reward.functions = {"own": {"path": path, "name": "one"}, "judge": {"path": judge}}
    manager = RewardManager(config, tokenizer, str(smollm2))
    manager.judges = OneServer(service.url)
    try:
        await manager.start()
        (sample,) = await score_all(manager, tokenizer, ["an answer"], make_prompt())
    finally:
        await manager.close()
    assert sample.reward_labels["pred"] == manager.judges.address
    assert sample.reward == pytest.approx(2 if batch else 2.8)


async def test_a_served_judge_that_no_function_asks_is_an_error(tokenizer, function_file):
    path = function_file("def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0")
    config = Config()
    config.reward.custom_reward_function.path = path
    manager = RewardManager(config, tokenizer, "models/judge")
    with pytest.raises(RewardError, match="no reward function takes reward_router_address"):
        await manager.start()


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("The answer is (B).", "B", 1),
        ("answer: c", "C", 0),  # a small letter may be a word
        ("Answer: C", "C", 1),
        ("Answer: **D**", "D", 1),
        ("First A seems right. But the correct answer is B", "B", 1),
        (r"so \boxed{A}", "A", 1),
        (r"\boxed{\text{(C)}}", "C", 1),
        ("I think\nB", "B", 1),
        ("(A) is wrong, so it is (D)", "D", 1),
        ("<answer>b</answer>", "B", 1),
        ("The answer is A", 0, 1),
        ("The answer is A", "1", 0),
        ("A man walks in.", "A", 0),
        ("The answer's B-side? Answer: A", "A", 1),
        ("", "A", 0),
        ("The answer is option D.", "(D)", 1),
    ],
)
def test_multiple_choice(text, truth, right):
    assert multiple_choice(text, truth)["score"] == right


async def test_reasoning_gym_rows_are_scored_by_its_own_scorer(started, tokenizer, tmp_path):
    import runpy

    script = runpy.run_path(str(ROOT / "examples/data_preprocess/reasoning_tasks.py"))
    import pyarrow as pa
    import reasoning_gym

    tasks = {"chain_sum": '{"max_terms": 3}', "basic_arithmetic": "{}", "countdown": "{}"}
    async with started(sources={"reasoning_gym/chain_sum"}, num_workers=1) as manager:
        for task, config in tasks.items():
            rows = list(script["make_rows"](task, "train", 4, 5, config))
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
            (row, *_) = pq.read_table(tmp_path / "rows.parquet").to_pylist()
            questions = reasoning_gym.create_dataset(task, seed=5, size=4, **json.loads(config))
            answers = [questions[0]["answer"], "17", "nothing"]
            prompt = make_prompt(row["data_source"], row["reward_model"]["ground_truth"], row["extra_info"])
            texts = [f"I think <answer>{answer}</answer>" for answer in answers]
            samples = await score_all(manager, tokenizer, [*texts, str(answers[0])], prompt)
            own = [questions.score_answer(answer, questions[0]) for answer in answers]
            assert [sample.reward for sample in samples] == [np.float32(score) for score in [*own, own[0]]]
            assert samples[0].reward == 1
            assert (samples[0].reward_parts["tagged"], samples[3].reward_parts["tagged"]) == (1, 0)
