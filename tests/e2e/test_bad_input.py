"""What a person sees of bad input: the key, file or row and what to do, no traceback, before training starts."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

CONFIGURATION, FAILED = 2, 1


@pytest.fixture
def bad_row(quickstart, tmp_path):
    """Training files whose fourth row has no prompt."""
    table = pq.read_table(quickstart / "train.parquet").to_pylist()
    table[3]["prompt"] = []
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def test_faults_that_the_configuration_shows(command, tiny, quickstart, tmp_path):
    broken = tmp_path / "other"
    shutil.copytree(tiny, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "gpt_bigcode"}))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "columns.parquet")
    for override, words in {
        "actor_rollout_ref.model.path=/nowhere": ("actor_rollout_ref.model.path", "no such folder"),
        f"actor_rollout_ref.model.path={broken}": ("gpt_bigcode", "llama"),
        f"data.train_files={tmp_path / 'columns.parquet'}": ("prompt", "text"),
        "reward.custom_reward_function.path=/nowhere.py": ("reward.custom_reward_function", "no such file"),
        "reward.custom_reward_function.name=absent": ("absent", "compute_score"),
        "data.train_batch_size=6": ("train_batch_size", "ppo_mini_batch_size"),
        "trainer.device=cuda": ("trainer.nnodes x n_gpus_per_node", "CUDA"),
        "actor_rollout_ref.rollout.temprature=1": ("temprature", "temperature"),
    }.items():
        output = command.run(override, code=CONFIGURATION)
        assert "Traceback" not in output, output
        for word in words:
            assert word in output, (override, word, output)


def test_an_empty_prompt_is_named_by_file_and_row(command, bad_row):
    output = command.run(f"data.train_files={bad_row}", code=CONFIGURATION)
    assert "Traceback" not in output, output
    assert "rows.parquet" in output
    assert "row 3 (counted from 0)" in output


def test_a_reward_function_that_always_fails_stops_the_run_and_is_named(command):
    command.reward.with_name("fails.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {}['score']\n"
    )
    output = command.run(
        f"reward.custom_reward_function.path={command.reward.with_name('fails.py')}",
        "trainer.val_before_train=false",
        code=FAILED,
    )
    assert "KeyError" in output
    assert "fails.py" in output
    assert "line 2" in output
    assert "reward.max_failure_rate" in output
    assert "the same command starts again at step 1: there is no checkpoint to go on from" in output


def test_a_reward_that_fails_now_and_then_costs_its_samples_only(command):
    command.reward.with_name("flaky.py").write_text(
        "import os, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    kind = sum(map(ord, solution_str)) % 11\n"
        "    if kind == 0:\n        raise ValueError('unlucky')\n"
        "    if kind == 1:\n        return 'text'\n"
        "    if kind == 2:\n        os._exit(3)\n"
        "    return kind / 11\n"
    )
    command.run(
        f"reward.custom_reward_function.path={command.reward.with_name('flaky.py')}",
        "trainer.total_training_steps=3",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "reward.max_failure_rate=0.9",
    )
    metrics = command.metrics()
    assert sorted(metrics) == [1, 2, 3]
    assert sum(row["reward/failures"] for row in metrics.values()) > 0
