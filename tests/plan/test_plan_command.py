"""The plan's command on a model of which there is only config.json: what fits, what does not, what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def config_folder(folder: Path, **sizes) -> Path:
    """A model folder without weights."""
    folder.mkdir()
    config = {
        "model_type": "qwen2",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config | sizes))
    return folder


def plan(model: Path, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jaxrl_ppo.plan", f"actor_rollout_ref.model.path={model}", *overrides]
    sizes = [
        "algorithm.adv_estimator=grpo",
        "data.max_prompt_length=128",
        "data.max_response_length=384",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=512",
    ]
    given = {text.partition("=")[0] for text in overrides}
    command += [text for text in sizes if text.partition("=")[0] not in given]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_small_model_fits_a_slice(tmp_path):
    done = plan(config_folder(tmp_path / "small"), "plan.topology=v5e:2x2", "actor_rollout_ref.actor.mesh.sequence=2")
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (
        "mesh fsdp 2 x sequence 2",
        "attention splash, rematerialisation full",
        "actor gradient: 4 rows of 512 tokens",
        "actor optimizer: parameters; 2 times a step",
        "log-probs: ",
        "all-to-all",
        "fits: ",
        "MFU of the actor's update is at most",
    ):
        assert text in done.stdout, text
    # Counted in the traced program and in the compiled one, by nothing in common. They differ in two things that the
    # compiler does otherwise than written. The attention's weight gradients are summed up over all tokens of a row by
    # each of the two chips along the sequence axis, not over its half. The logits, one chunk only, are not computed
    # again for their gradient.
    found = re.findall(r"work +(\S+) TFLOP \((\S+) as compiled\)", done.stdout)
    assert len(found) == 3
    tokens, targets, width, keys, layers, vocabulary = 4 * 512 / 4, 4 * 384 / 4, 256, 128, 3, 512  # a chip's
    again = 2 * layers * tokens * width * (width + keys + keys + width) - 2 * targets * width * vocabulary
    for (traced, compiled), more in zip(found, (again / 1e12, 0, 0)):
        assert float(compiled) == pytest.approx(float(traced) + more, rel=1e-3)
    assert float(found[0][0]) > 3 * float(found[2][0]) > 0  # the gradient's and the log-probs'


def test_a_model_too_large_for_a_slice_does_not_fit(tmp_path):
    # 4.3 billion parameters, nearly all in the embedding and the head: quick to compile, too large for four chips.
    large = config_folder(
        tmp_path / "large", hidden_size=8192, vocab_size=262144, num_hidden_layers=1, num_attention_heads=64
    )
    done = plan(large, "plan.topology=v5e:2x2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "does not fit: " in done.stdout
    assert "more chips" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "plan.topology must be given once"),
        (["plan.topology=v5e:2"], "plan.topology=v5e:2: libtpu does not give this topology"),
        (["plan.topology=cpu:2", "trainer.n_gpus_per_node=4"], "= 4 devices, and plan.topology=cpu:2 has 2"),
        (["plan.topology=cpu:2", "actor_rollout_ref.actor.mesh.tensor=3"], "does not multiply to"),
        (
            ["plan.topology=cpu:2", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100"],
            "ppo_max_token_len_per_gpu=100 holds less than one longest sample",
        ),
    ],
)
def test_what_cannot_be_planned(tmp_path, overrides, message):
    done = plan(config_folder(tmp_path / "model"), *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
