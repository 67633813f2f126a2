"""Every pipeline mode end to end: Hydra, Ray, a trainer pool, rollout replicas, rewards, the run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import ml_dtypes  # noqa: F401 - numpy learns "bfloat16" from it
import numpy as np
import psutil
import pytest
import yaml
from safetensors.numpy import load_file

from jaxrl_ppo import export
from jaxrl_ppo.observability.run_folder import read_metrics
from jaxrl_ppo.observability.timeline import generation_overlap, read_spans

STEPS = 4


@pytest.mark.parametrize(("mode", "staleness"), [("sync", [0, 0, 0, 0]), ("one_step_off", [0, 1, 1, 1])])
def test_mode_runs_to_its_end(command, mode, staleness):
    settings = (f"trainer.mode={mode}", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2")
    output = command.run(*settings)
    metrics = command.metrics()
    assert [metrics[step]["training/staleness"] for step in range(1, STEPS + 1)] == staleness
    assert "step 4/4" in output
    assert "validation at step 4" in output
    for step in range(1, STEPS + 1):
        for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "timing_s/gen", "timing_s/step"):
            assert np.isfinite(metrics[step][name]), name
    for step in (0, 2, 4):
        assert any(name.startswith("val-core/arithmetic/") for name in metrics[step])
    assert command.ordinals() == {s: [4 * (s - 1) + i for i in range(4) for _ in range(4)] for s in range(1, 5)}
    assert (command.folder / "global_step_4" / "COMMITTED").exists()
    assert yaml.safe_load((command.folder / "config.yaml").read_text())["trainer"]["mode"] == mode
    json.loads((command.folder / "timeline.json").read_text())
    overlap = generation_overlap(read_spans(command.folder / "timeline.json"))
    if mode == "sync":
        assert set(overlap.values()) == {0}
        # What is complete can still be validated, and says the same.
        record = [command.folder / name for name in ("config.yaml", "metrics.jsonl", "timeline.json")]
        written = {path: path.read_bytes() for path in record}
        assert "validation at step 4" in command.run(*settings, "trainer.val_only=true")
        scores = {name: value for name, value in metrics[4].items() if name.startswith("val-core/")}
        (row,) = read_metrics(command.folder / "val_only")
        assert row.items() >= {"step": 4, **scores}.items()
        assert written == {path: path.read_bytes() for path in written}  # the training's own record
    else:
        assert all(overlap[step] > 0 for step in range(1, STEPS)), overlap


# An adapter that a few steps move far: the replicas get it merged into the weights that it adds to.
LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1e-2")


def test_jax_engine_in_float32_gives_the_trainers_log_probs(command):
    command.run(
        "trainer.mode=sync",
        "trainer.total_training_steps=3",
        "actor_rollout_ref.rollout.dtype=float32",
        "algorithm.rollout_correction.bypass_mode=false",
        *LORA,
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.save_freq=3",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    )
    exported = command.folder / "global_step_3" / "huggingface"
    adapter = load_file(exported / "lora_adapter" / "adapter_model.safetensors")
    assert all(np.abs(factor).max() > 1e-3 for factor in adapter.values())
    name = "model.layers.1.mlp.down_proj"
    update = adapter[f"base_model.model.{name}.lora_B.weight"] @ adapter[f"base_model.model.{name}.lora_A.weight"]
    base, merged = (
        load_file(folder / "model.safetensors")[f"{name}.weight"].astype(np.float32)
        for folder in (command.model, exported)
    )
    np.testing.assert_allclose(merged, base + 16 / 4 * update, rtol=1e-5, atol=1e-6)
    assert command.metrics()[3]["actor/kl_loss"] > 0  # to the model without its adapter
    for step, row in command.metrics().items():
        if step:
            assert "training/rollout_probs_diff_max" in row
            # In log-probs: a random model's probabilities are so small that no difference between them means anything.
            assert row["rollout_corr/log_ppl_abs_diff"] < 1e-5


def test_vllm_replicas_train_too(command):
    command.run(
        "actor_rollout_ref.rollout.name=vllm",
        "rollout.n_gpus_per_node=2",
        "trainer.total_training_steps=3",
        "actor_rollout_ref.rollout.dtype=float32",
        *LORA,  # which the probe after each weight sync would miss, were it not merged
    )
    metrics = command.metrics()
    assert [metrics[step]["training/staleness"] for step in (1, 2, 3)] == [0, 1, 1]
    assert "training/rollout_probs_diff_max" in metrics[1]
    assert metrics[1]["rollout_corr/log_ppl_abs_diff"] < 1e-4  # the first batch is not stale


RESUMED = (
    "trainer.total_training_steps=5",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
)
# The critic alone in the first step, so that a checkpoint of its warm-up is among those that can be resumed from.
WITH_CRITIC = (
    "algorithm.adv_estimator=gae",
    "trainer.critic_warmup=1",
    "critic.optim.lr=1e-3",
    "critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
)
DRAINED = ("trainer.mode=async", "async_training.max_staleness=1", "async_training.partial_rollout=false")


def weights(folder: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize(
    ("mode", "interrupted", "more"),
    [
        ("sync", ("trainer.mode=sync",), WITH_CRITIC),
        ("one_step_off", ("trainer.mode=one_step_off",), ()),
        ("one_step_off", DRAINED, ()),  # which is the same, step for step
    ],
    ids=["sync-critic", "one_step_off", "async-drained"],
)
def test_killed_and_started_again_it_goes_on_exactly(command, mode, interrupted, more, tmp_path):
    models = ("huggingface", "huggingface_critic") if more else ("huggingface",)
    command.run(f"trainer.mode={mode}", *RESUMED, *more)
    whole = {model: weights(command.folder / "global_step_5" / model) for model in models}
    ordinals = command.ordinals()

    command.folder = tmp_path / "killed"
    settings = (*interrupted, *RESUMED, *more)
    process = command.start(*settings)
    wait_for(command.folder / "global_step_2" / "COMMITTED", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()

    output = command.run(*settings)
    assert "going on after step" in output
    assert command.ordinals() == ordinals
    assert {model: weights(command.folder / "global_step_5" / model) for model in models} == whole


@pytest.mark.parametrize("seen", ["metrics to", "starting the trainer"])
def test_told_to_stop_while_it_starts_it_says_that_nothing_is_lost(command, seen):
    process = command.start("trainer.total_training_steps=2")
    lines = []
    while seen not in (lines or [""])[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=200)
    assert process.returncode == 143, rest
    assert "the same command starts again" in rest
    assert "Traceback" not in rest


def test_told_to_stop_it_saves_and_what_is_complete_is_exported(command, tmp_path):
    settings = ("trainer.mode=one_step_off", *RESUMED, "trainer.save_freq=3")
    process = command.start(*settings)
    wait_for(command.folder / "samples" / "rollout_000001.jsonl", process)
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    assert "asked to stop" in output
    assert "stopped after step" in output
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert (command.folder / "latest_checkpointed_iteration.txt").read_text() in ("1", "2", "3")

    refused = command.run(*settings, "actor_rollout_ref.model.custom_chat_template='{{messages}}'", code=1)
    assert "chat template was" in refused
    refused = command.run(*settings, "trainer.mode=sync", code=1)
    assert "trainer.mode=one_step_off had generated ahead" in refused
    assert "going on after step" in command.run(*settings)
    assert "nothing to do" in command.run(*settings)

    last = command.folder / "global_step_5"
    export.main([str(last), str(tmp_path / "exported")])
    assert weights(tmp_path / "exported") == weights(last / "huggingface")
    with pytest.raises(SystemExit, match="no committed checkpoint"):
        export.main([str(command.folder), str(tmp_path / "other")])


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    """Until `file` is there, or the process has ended without it."""
    deadline = time.time() + 300
    while not file.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.time() < deadline
        time.sleep(0.05)


SAME_ANSWERS = """
import dataclasses
import zlib

import numpy as np


class SameAnswers:
    def __init__(self, tokenizer, config, tools):
        self.length = config.response_length

    async def run(self, prompt, conversation):
        await conversation.generate()
        drawn = conversation.completion()
        ids = [zlib.crc32(f"{drawn.request_id} {i}".encode()) % 40000 + 100 for i in range(self.length)]
        return dataclasses.replace(
            drawn,
            token_ids=np.array(ids, np.int32),
            log_probs=np.full(self.length, -10.8, np.float32),  # about as likely as any other answer
            versions=np.full(self.length, drawn.versions[0], np.int32),
            finish_reason="length",
            mask=np.ones(self.length, np.float32),
            turns=(),
        )
"""


def test_two_processes_with_two_devices_train_as_one_with_one(command, tmp_path):
    # The same samples for both: among a random model's 49,152 nearly equal chances, the last bit of a weight is enough
    # to draw another token.
    (tmp_path / "same_answers.py").write_text(SAME_ANSWERS)
    settings = (
        "trainer.mode=sync",
        "trainer.total_training_steps=3",
        "trainer.test_freq=-1",
        "actor_rollout_ref.rollout.dtype=float32",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/same_answers.py:SameAnswers",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.calculate_entropy=true",
    )
    command.run(*settings)
    one = command.metrics()
    command.folder = tmp_path / "four"
    command.run(*settings, "trainer.nnodes=2", "trainer.n_gpus_per_node=2")
    four = command.metrics()
    assert abs(one[3]["actor/entropy"] - one[1]["actor/entropy"]) > 1e-4  # the updates do something
    for step in (1, 2, 3):
        assert one[step]["actor/grad_norm"] > 0.1
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
            assert one[step][name] == pytest.approx(four[step][name], abs=1e-4), (step, name)
