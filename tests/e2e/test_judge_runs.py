"""A whole run whose rewards come from a judge that the run serves itself, and whose server is killed on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pytest
import torch
import transformers

# The first sample kills the server in the middle of its call.
ASKS = """
import asyncio
import json
import os
import signal
import urllib.request

import psutil

CLAIM, MODEL = {claim!r}, {model!r}


async def compute_score(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer
):
    messages = [{{"role": "user", "content": "Grade: " + solution_str}}]
    try:
        open(CLAIM, "x").close()
        os.kill(server(int(reward_router_address.split(":")[1])), signal.SIGKILL)
    except FileExistsError:
        pass
    answer = await asyncio.to_thread(ask, reward_router_address, messages)
    said, own = answer["choices"][0], reward_model_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    return {{
        "score": sum(said["token_ids"]) % 7 / 7,
        "judgement": said["message"]["content"],
        "tokens": json.dumps(said["token_ids"]),
        "longer": answer["usage"]["prompt_tokens"] - len(own),
    }}


def server(port):
    return next(c.pid for c in psutil.net_connections() if c.laddr.port == port and c.status == "LISTEN")


def ask(address, messages):
    body = {{"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8, "return_token_ids": True}}
    request = urllib.request.Request(
        f"http://{{address}}/v1/chat/completions", json.dumps(body).encode(), {{"Content-Type": "application/json"}}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
    with direct.open(request, timeout=50) as response:
        return json.load(response)
"""


@pytest.fixture(scope="module")
def judge(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose answers depend on what it is asked."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(7)
    config = transformers.AutoConfig.from_pretrained(tiny)
    config.tie_word_embeddings, config.initializer_range, config.max_position_embeddings = False, 0.2, 512
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for file in (*tiny.glob("token*"), tiny / "generation_config.json"):
        shutil.copy(file, folder)
    return folder


def test_a_judge_that_the_run_serves_and_whose_server_is_killed(command, judge, tmp_path):
    (tmp_path / "asks.py").write_text(ASKS.format(claim=str(tmp_path / "claim"), model=str(judge)))
    output = command.run(
        f"reward.custom_reward_function.path={tmp_path}/asks.py",
        "reward.reward_model.enable=true",
        "reward.reward_model.enable_resource_pool=true",
        "reward.reward_model.nnodes=1",
        "reward.reward_model.n_gpus_per_node=1",
        f"reward.reward_model.model_path={judge}",
        "reward.reward_model.rollout.name=vllm",
        "reward.reward_model.rollout.dtype=float32",
        "reward.reward_model.rollout.max_model_len=512",
        "actor_rollout_ref.rollout.name=jax",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    )
    assert f"which asks the judge {judge}" in output
    assert "a judge, 1 server of 1 device each; engine: vllm, float32" in output
    metrics = command.metrics()
    assert [metrics[step]["fault/reward_model_failed"] for step in (1, 2)] == [1, 0]
    assert metrics[1]["reward/failures"] == metrics[2]["reward/failures"] == 0
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if str(judge) in (process.info["cmdline"] or ())
    ]

    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    model = transformers.AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32).eval()
    files = sorted((command.folder / "samples").glob("rollout_*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(rows) == 32
    assert len({row["labels"]["tokens"] for row in rows}) > 5
    for row in rows:
        asked = [{"role": "user", "content": "Grade: " + row["response"]}]
        ids = torch.tensor([tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)])
        with torch.no_grad():
            said = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :].tolist()
        assert json.loads(row["labels"]["tokens"]) == said
        assert row["reward"] == pytest.approx(sum(said) % 7 / 7)
        assert row["reward_parts"]["longer"] == 0
        text = tokenizer.decode(said, skip_special_tokens=True)
        assert row["labels"]["judgement"] == text or "\ufffd" in text
