"""A whole run whose rewards come from a reward model in a pool of its own and from a function that fails every way."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from jaxrl_ppo.observability.report.collect import collect_run

KINDS = {"hang": "timeout", "crash": "crash", "memory": "memory", "nan": "nan", "type": "type"}
# The first samples get one fault each, and keep it when they are tried again.
FAULTY = """
import os
from pathlib import Path

FOLDER = Path({folder!r})


def compute_score(data_source, solution_str, ground_truth, extra_info):
    for fault in ("hang", "crash", "memory", "nan", "type", "prints"):
        try:
            with open(FOLDER / fault, "x") as file:
                file.write(solution_str)
        except FileExistsError:
            if (FOLDER / fault).read_text() != solution_str:
                continue
        return act(fault)
    return 0.25


def act(fault):
    while fault == "hang":
        pass
    if fault == "crash":
        os._exit(7)
    if fault == "memory":
        return len(bytearray(4 << 30))
    if fault == "prints":
        for _ in range(400):
            print("x" * 10_000)
        return 0.75
    return float("nan") if fault == "nan" else "a text"
"""


@pytest.fixture(scope="module")
def judge(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random sequence classifier with the policy's tokenizer."""
    folder = tmp_path_factory.mktemp("judge")
    config = transformers.AutoConfig.from_pretrained(tiny)
    config.num_labels, config.eos_token_id, config.pad_token_id = 1, None, None
    torch.manual_seed(5)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    for file in tiny.glob("token*"):
        shutil.copy(file, folder)
    return folder


def test_a_reward_model_and_a_function_that_fails_in_every_way(command, judge, tmp_path):
    (tmp_path / "claims").mkdir()
    (tmp_path / "faulty.py").write_text(FAULTY.format(folder=str(tmp_path / "claims")))
    output = command.run(
        "reward.custom_reward_function.path=null",
        f"+reward.functions.rule={{path: {tmp_path}/faulty.py, weight: 2.0}}",
        "reward.timeout_s=3",
        "reward.max_failure_rate=0.5",
        "reward.reward_model.enable=true",
        "reward.reward_model.enable_resource_pool=true",
        "reward.reward_model.nnodes=1",
        "reward.reward_model.n_gpus_per_node=2",
        f"reward.reward_model.model_path={judge}",
        "reward.reward_model.weight=0.5",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    )
    assert "2.0 x rule + 0.5 x the reward model" in output
    assert "step 1: 5 of 16 rewards failed" in output
    metrics = command.metrics()
    assert metrics[1]["reward/failures"] == 5
    for kind in KINDS.values():
        assert metrics[1][f"reward/failures/{kind}"] == 1, kind
    assert metrics[1]["fault/rewards_failed"] == 1
    assert metrics[1]["fault/reward_worker_lost"] == 3  # one hung, one crashed and crashed again
    assert metrics[2]["reward/failures"] == metrics[2]["fault/reward_worker_lost"] == 0
    assert metrics[2]["reward/rule/mean"] == 0.25
    assert math.isfinite(metrics[2]["reward/reward_model/mean"])

    rows = [json.loads(line) for line in (command.folder / "samples/rollout_000001.jsonl").read_text().splitlines()]
    claims = {fault: (tmp_path / "claims" / fault).read_text() for fault in (*KINDS, "prints")}
    failed = {row["response"]: row for row in rows if "labels" in row}
    assert {claims[fault]: kind for fault, kind in KINDS.items()} == {
        text: row["labels"]["failure"].split(":")[0] for text, row in failed.items()
    }
    assert all(row["reward"] == 0 for row in failed.values())
    summary = collect_run(command.folder, "run", sample_bytes=1 << 20).summary
    assert any(mark["name"] == "reward_worker_lost" for mark in summary["spans"]["marks"])

    # The oracle reads the policy's own tokens, as far as their text tells which they are.
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(judge).eval()
    scored = [row for row in rows if row["response"] not in failed]
    assert len({row["reward_parts"]["reward_model"] for row in scored}) > 5
    compared = 0
    for row in scored:
        parts = row["reward_parts"]
        assert parts["rule"] == (0.75 if row["response"] == claims["prints"] else 0.25)
        assert row["reward"] == pytest.approx(2 * parts["rule"] + 0.5 * parts["reward_model"], abs=1e-5)
        prompt, *tokens = (tokenizer.encode(t, add_special_tokens=False) for t in (row["prompt"], *row["tokens"]))
        if all(len(token) == 1 for token in tokens):
            with torch.no_grad():
                score = model(torch.tensor([prompt + [token for (token,) in tokens]])).logits.item()
            assert score == pytest.approx(parts["reward_model"], abs=1e-4)
            compared += 1
    assert compared
