"""User code in reward processes: what it may return, and every way it may go wrong, each costing its own sample."""

import asyncio
import os
import re

import numpy as np
import psutil
import pytest

from jaxrl_ppo import user_code
from jaxrl_ppo.rewards import RewardError, pool
from jaxrl_ppo.schema.records import Prompt, Sample


def make_sample(tokenizer, text, index=0):
    ids = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.int32)
    n = len(ids)
    ones, zeros = np.ones(n, np.float32), np.zeros(n, np.float32)
    return Sample(7, index, ids, ones, zeros, np.zeros(n, np.int32), "stop")


def make_prompt(source="mine", truth="4", info=None):
    return Prompt(7, (1, 2), [{"role": "user", "content": "?"}], source, truth, info or {})


async def score_all(manager, tokenizer, texts, prompt=None):
    samples = [make_sample(tokenizer, text, index) for index, text in enumerate(texts)]
    await asyncio.gather(*(manager.score(prompt or make_prompt(), sample) for sample in samples))
    return samples


async def test_arguments_and_result(started, tokenizer, function_file):
    path = function_file("""
        import dataclasses, os
        def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0):
            assert solution_str == "naïve 4" and extra_info == {"a": [1, None]}, (solution_str, extra_info)
            return {"score": 0.75 + bonus, "acc": True, "pred": "4", "length": len(solution_str), "none": None,
                    "same": data_source == "mine" and ground_truth == "4", "pid": os.getpid()}
    """)
    async with started(path, arguments={"bonus": 0.1}) as manager:
        (sample,) = await score_all(manager, tokenizer, ["naïve 4"], make_prompt(info={"a": [1, None]}))
        assert sample.text == "naïve 4"
        assert sample.reward == np.float32(0.85)
        assert sample.reward_parts.pop("pid") != os.getpid()
        assert sample.reward_parts == {"score": np.float32(0.85), "acc": 1.0, "length": 7.0, "same": 1.0}
        report = manager.batch_report("step 1")
        assert report["reward/failures"] == 0
        assert report["reward/length/mean"] == 7
        assert manager.batch_report("step 1") == {"reward/failures": 0}


@pytest.mark.parametrize(
    "value", ["1", "0.1", "-3.5", "__import__('numpy').float32(0.1)", "__import__('numpy').array(2)"]
)
async def test_numbers_become_float32(started, tokenizer, function_file, value):
    path = function_file(f"compute_score = lambda data_source, solution_str, ground_truth, extra_info: {value}")
    async with started(path) as manager:
        (sample,) = await score_all(manager, tokenizer, ["x"])
        assert sample.reward == np.float32(eval(value))
        assert sample.reward_parts == {}


FAULTS = """
    import os, signal, sys, threading, time
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "raise": raise ValueError("no such thing\\nsecond line")
        if solution_str == "exit": sys.exit(3)
        if solution_str == "hang":
            while True: pass
        if solution_str == "sleep": time.sleep(1000)
        if solution_str == "crash": os._exit(5)
        if solution_str == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        if solution_str == "memory": return len(bytearray(4 << 30))
        if solution_str == "nan": return float("nan")
        if solution_str == "inf": return {"score": 1, "x": float("inf")}
        if solution_str == "huge": return 1e39
        if solution_str == "text": return "1.0"
        if solution_str == "none": return None
        if solution_str == "bool": return True
        if solution_str == "list": return [1]
        if solution_str == "dict": return {"acc": 1}
        if solution_str == "part": return {"score": 1, "x": [1]}
        if solution_str == "noscore": return {"score": None}
        if solution_str == "prints":
            for _ in range(300): print("x" * 10_000)
        return 1.0
"""


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("raise", "exception", r"ValueError: no such thing \(.*reward.py, line 4\)"),
        ("exit", "exception", "SystemExit: 3"),
        ("hang", "timeout", r"no reward within reward\.timeout_s=1 s"),
        ("sleep", "timeout", r"no reward within reward\.timeout_s=1 s"),
        ("crash", "crash", "the reward process ended with exit status 5, twice"),
        ("segfault", "crash", "the reward process was killed by SIGSEGV, twice"),
        ("memory", "memory", r"MemoryError: .*line 11"),
        ("nan", "nan", "the reward function returned nan, which is no finite float32"),
        ("inf", "nan", "the reward function returned 'x': inf, which"),
        ("huge", "nan", r"the reward function returned 1e\+39, which"),
        ("text", "type", "the reward function returned '1.0', a str, not a number"),
        ("none", "type", "the reward function returned None, a NoneType, not a number"),
        ("bool", "type", r"the reward function returned True, a bool; return a number, e.g. float\(True\)"),
        ("list", "type", r"the reward function returned \[1\], a list"),
        ("dict", "type", r"the reward function returned a dict without 'score'; its keys: \['acc'\]"),
        ("part", "type", r"the reward function returned 'x': \[1\], a list, not a number"),
        ("noscore", "type", "the reward function returned 'score': None, a NoneType"),
    ],
)
async def test_a_fault_costs_one_sample(started, patient, tokenizer, function_file, text, kind, message):
    async with started(function_file(FAULTS), timeout_s=1.0 if kind == "timeout" else 60.0) as manager:
        samples = await score_all(manager, tokenizer, ["good", text, "good", "good", "good"])
        assert [sample.reward for sample in samples] == [1, 0, 1, 1, 1]
        report = manager.batch_report("step 1")
        assert report["reward/failures"] == report[f"reward/failures/{kind}"] == 1
        (failed,) = manager.last_failures
        assert (failed.index, failed.text, failed.failure.kind) == (1, text, kind)
        assert re.search(message, failed.failure.message)
        if text in ("hang", "sleep"):
            assert f"line {8 if text == 'sleep' else 7} in compute_score" in failed.failure.traceback
        (after,) = await score_all(manager, tokenizer, ["good"])
        assert after.reward == 1


async def test_megabytes_of_output_are_cut(started, tokenizer, function_file, capfd):
    async with started(function_file(FAULTS)) as manager:
        samples = await score_all(manager, tokenizer, ["prints", "good", "prints"])
        assert [sample.reward for sample in samples] == [1, 1, 1]
        await manager.close()
        shown = capfd.readouterr().err
        assert 60_000 < len(shown) < 2 * 66_000
        assert "further output of this reward process is not shown" in shown


async def test_too_many_failures_end_the_run(started, tokenizer, function_file):
    async with started(function_file(FAULTS), max_failure_rate=0.5) as manager:
        await score_all(manager, tokenizer, ["raise", "raise", "none", "good"])
        with pytest.raises(RewardError) as caught:
            manager.batch_report("step 1")
        message = str(caught.value)
        assert message.startswith(
            "step 1: 3 of 4 rewards failed: 2 exception, 1 type\n  2 x exception: ValueError: no such"
        )
        assert "prompt 7, sample 0, data_source 'mine': 'raise'" in message
        assert "1 x type: the reward function returned None" in message
        assert "prompt 7, sample 2, data_source 'mine': 'none'" in message
        assert "jaxrl_ppo" not in message  # nothing of ours between the person and their code
        assert 'raise ValueError("no such thing' in message  # the traceback
        assert "more than reward.max_failure_rate=0.5" in message
        await score_all(manager, tokenizer, ["raise", "good"])
        assert manager.batch_report("step 1")["reward/failures"] == 1  # exactly the rate is not more


async def test_the_report_is_of_the_batch_in_whatever_order_its_calls_end(started, tokenizer, function_file):
    path = function_file("""
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            if solution_str == "raise": raise ValueError("no")
            return {"score": 0.0, "part": float(solution_str)}
    """)
    texts = ["raise", "1e8", "1", "-1e8", "raise"]
    async with started(path, num_workers=1) as manager:
        for order in ([0, 1, 2, 3, 4], [4, 1, 3, 2, 0]):
            for index in order:
                await manager.score(make_prompt(), make_sample(tokenizer, texts[index], index))
            assert manager.batch_report("step 1")["reward/part/mean"] == 1 / 3
            assert [failed.index for failed in manager.last_failures] == [0, 4]


async def test_a_fault_in_a_process_of_many_coroutines_costs_one_sample(started, tokenizer, function_file):
    path = function_file("""
        import asyncio, os
        all_came = asyncio.Event()
        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            if solution_str == "crash": os._exit(1)
            if solution_str == "wait":
                all_came.set()
                await asyncio.sleep(1000)
            if solution_str == "raise": raise KeyError("x")
            if solution_str == "together": await all_came.wait()
            return {"score": 1.0, "pid": os.getpid()}
    """)
    async with started(path, timeout_s=2.0, num_workers=1) as manager:
        samples = await score_all(manager, tokenizer, ["together"] * 20 + ["wait", "raise"])
        assert [sample.reward for sample in samples] == [1] * 20 + [0, 0]
        assert len({sample.reward_parts["pid"] for sample in samples[:20]}) == 1  # all in one process, at the same time
        report = manager.batch_report("step 1")
        assert (report["reward/failures/timeout"], report["reward/failures/exception"]) == (1, 1)
        samples = await score_all(manager, tokenizer, ["good", "crash", "good"])
        assert [sample.reward for sample in samples] == [1, 0, 1]
        assert manager.batch_report("step 1")["reward/failures/crash"] == 1


async def test_a_coroutine_that_blocks_is_ended_with_its_process(
    started, patient, tokenizer, function_file, monkeypatch
):
    from jaxrl_ppo.rewards import process

    monkeypatch.setattr(process, "GRACE_S", 0.5)
    path = function_file("""
        import time
        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            if solution_str == "block": time.sleep(1000)
            return 1.0
    """)
    async with started(path, timeout_s=1.0) as manager:
        samples = await score_all(manager, tokenizer, ["good", "block", "good"])
        assert [sample.reward for sample in samples] == [1, 0, 1]
        assert manager.batch_report("step 1")["reward/failures/timeout"] == 1


async def test_more_calls_than_processes(started, tokenizer, function_file):
    path = function_file("""
        import os
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return {"score": float(solution_str), "pid": os.getpid()}
    """)
    async with started(path, num_workers=3) as manager:
        for _ in range(4):
            samples = await score_all(manager, tokenizer, [str(i) for i in range(50)])
            assert [sample.reward for sample in samples] == list(range(50))
        children = psutil.Process().children()
        workers = {child.pid for child in children if "jaxrl_ppo.rewards.worker" in child.cmdline()}
        assert {sample.reward_parts["pid"] for sample in samples} <= workers
        assert len(workers) <= 3


async def test_cancelled_calls_leave_a_working_pool(started, tokenizer, function_file):
    faults = []
    async with started(function_file(FAULTS), num_workers=1, timeout_s=30.0) as manager:
        manager.report_faults(lambda name, message: faults.append(name))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await score_all(manager, tokenizer, ["sleep"])
        (sample,) = await score_all(manager, tokenizer, ["good"])
        assert sample.reward == 1
    assert not faults


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def compute_score(data_source\n", r"SyntaxError: .*reward\.py, line 1\)"),
        ("import no_such_module\n", r"ModuleNotFoundError: No module named 'no_such_module' \(.*reward\.py, line 1\)"),
        ("x = 1\n\ny = x / 0\n", r"ZeroDivisionError: division by zero \(.*reward\.py, line 3\)"),
        ("def other(): pass\n", r"has no 'compute_score'; what it defines: other"),
        ("compute_score = 3\n", "defines it as a int, not a function"),
        (
            "\ndef compute_score(text, truth): return 1\n",
            r"compute_score\(text, truth\) is called with the keyword arguments data_source, solution_str, "
            r"ground_truth, extra_info: .*line 2\)",
        ),
        ("import os\nos._exit(9)\n", "a reward process ended with exit status 9 before it was ready"),
        ("import sys\nsys.exit('bye')\n", r"the reward function's file called sys\.exit\('bye'\) while it was loaded"),
    ],
)
async def test_a_bad_function_file_is_an_error_at_start(started, function_file, source, message):
    with pytest.raises(RewardError, match=message):
        async with started(function_file(source)):
            pass


async def test_missing_function_file_and_arguments_it_does_not_take(started, function_file, tmp_path):
    with pytest.raises(RewardError, match=r"reward\.custom_reward_function: there is no file .*none\.py"):
        async with started(str(tmp_path / "none.py")):
            pass
    path = function_file("def mine(data_source, solution_str, ground_truth, extra_info): return 0\n")
    with pytest.raises(RewardError, match="unexpected keyword argument 'bonus'"):
        async with started(path, name="mine", arguments={"bonus": 1}):
            pass


async def test_rows_without_a_scorer_are_an_error_at_start(started, tokenizer):
    with pytest.raises(RewardError, match=r"no scorer for data_source 'mine' \(there are: .*openai/gsm8k"):
        async with started(sources={"arithmetic", "mine"}):
            pass
    async with started(sources={"arithmetic", "aime_2025"}) as manager:
        (sample,) = await score_all(manager, tokenizer, ["2 + 2 = 4"], make_prompt("arithmetic"))
        assert sample.reward == 1
        await score_all(manager, tokenizer, ["4", "5"], make_prompt("mine"))
        with pytest.raises(RewardError, match="no scorer for data_source 'mine'"):
            manager.batch_report("step 1")


async def test_functions_that_always_hang_end_the_run_early(started, patient, tokenizer, function_file, monkeypatch):
    monkeypatch.setattr(pool, "ALL_HUNG", 3)
    async with started(function_file(FAULTS), timeout_s=0.2, num_workers=3) as manager:
        with pytest.raises(RewardError) as caught:
            await score_all(manager, tokenizer, ["sleep"] * 9)
        assert str(caught.value).startswith("all of the first 3 rewards took more than reward.timeout_s=0.2 s")
        assert re.search(
            r"compute_score of .*reward\.py .* for prompt 7, sample \d, data_source 'mine'", str(caught.value)
        )
        assert "line 8 in compute_score" in str(caught.value)
    async with started(function_file(FAULTS), timeout_s=0.2, num_workers=3) as manager:
        await score_all(manager, tokenizer, ["good"])
        samples = await score_all(manager, tokenizer, ["sleep"] * 4)
        assert [sample.reward for sample in samples] == [0] * 4


async def test_a_slow_import_is_told_with_its_key(started, function_file, monkeypatch, caplog):
    monkeypatch.setattr(user_code, "SLOW_IMPORT_S", 0.2)
    path = function_file("import time; time.sleep(1)\ndef compute_score(**call): return 1.0\n")
    async with started(path):
        pass
    told = f"still importing, after 0.2 of 300 s at most: compute_score of {path} (reward.custom_reward_function)"
    assert caplog.messages[0] == told
