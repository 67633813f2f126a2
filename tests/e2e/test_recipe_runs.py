"""Recipes of examples/ as whole runs: a greedy baseline generated with the batch, and prompts that are replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"


def run_recipe(command, name: str, *overrides: str) -> None:
    """A recipe on the tiny model: the test's settings come after its own."""
    arguments = command.arguments("actor_rollout_ref.rollout.dtype=float32", *overrides)[3:]
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    result = subprocess.run(
        ["bash", str(RECIPES / f"{name}.sh"), *arguments],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout


def samples(command, step: int) -> list[dict]:
    path = command.folder / "samples" / f"rollout_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_remax_subtracts_the_score_of_transformers_greedy_answer(command):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_recipe(
        command, "remax", "trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=false"
    )
    tokenizer, model = (kind.from_pretrained(command.model) for kind in (AutoTokenizer, AutoModelForCausalLM))
    for sample in samples(command, 1):
        prompt = tokenizer(sample["prompt"], add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            answer = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt.input_ids.shape[1] :]
        baseline = sum(map(ord, tokenizer.decode(answer, skip_special_tokens=True))) % 7 / 7
        # The policy is still the reference, so no part of the first step's reward is a KL penalty.
        assert sample["advantage"] == pytest.approx(sample["reward"] - baseline, abs=1e-4)
    assert command.metrics()[2]["actor/grad_norm"] > 0


def test_dapo_with_a_token_baseline_trains_on_prompts_whose_samples_differ_and_on_no_others(command, tmp_path):
    reward = tmp_path / "mostly_dull.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 0.5 if extra_info['index'] % 3 else sum(map(ord, solution_str)) % 7 / 7\n"
    )
    run_recipe(
        command, "dapo", "algorithm.adv_estimator=optimal_token_baseline",
        "data.max_response_length=16", "data.shuffle=false",
        f"reward.custom_reward_function.path={reward}", "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
        "trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=false",
    )  # fmt: skip
    metrics = command.metrics()
    trained = []
    for step in (1, 2):
        scores = {}
        for sample in samples(command, step):
            scores.setdefault(sample["ordinal"], []).append(sample["reward"])
        assert len(scores) == 4
        assert all(np.std(group) > 0 for group in scores.values())
        assert metrics[step]["training/generated_prompts"] == 4 + metrics[step]["training/dropped_prompts"]
        assert metrics[step]["training/num_gen_batches"] >= 2
        assert metrics[step]["actor/grad_norm"] > 0
        trained += scores
    assert trained == [3 * i for i in range(8)]  # rows come in the order of the file
