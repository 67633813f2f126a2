"""The table says in words what the numbers of a configuration come to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jaxrl_ppo.schema import sizes
from jaxrl_ppo.schema.table import render
from jaxrl_ppo.schema.validate import Checked

ROLLOUT = "actor_rollout_ref.rollout"


def rows(text: str) -> dict[str, str]:
    return {
        line[2:].split("  ")[0]: line.strip().split("  ")[-1].strip() for line in text.splitlines() if line[0] == " "
    }


def test_table(check: Callable[..., Checked]) -> None:
    checked = check(
        "data.train_batch_size=32",
        f"{ROLLOUT}.n=5",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.mesh.tensor=2",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.device=tpu",
        "trainer.total_training_steps=7",
    )
    table = rows(render(checked.config))
    assert table["prompts per step"] == "32"
    assert table["samples per prompt"] == "5, temperature 1"
    assert table["sequences per step"] == "160"
    assert table["sequences per optimizer step"] == "40"
    assert table["optimizer steps per step"] == "8"
    assert table["tokens per device at most"] == "16,384 at a time"
    assert table["staleness"].startswith("0: ")
    assert table["trainer"] == "8 (TPU): 1 node x 8; mesh: fsdp 4 x tensor 2"
    assert table["rollout"] == "8 (TPU): 1 node x 8, the trainer's, in turns"
    assert table["rollout replicas"].startswith("4 of 2 devices each; engine: auto")
    assert table["KL to the reference policy"] == "0.001 x low_var_kl in the loss"
    assert table["length"] == "7 steps"


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (["ppo_micro_batch_size_per_gpu=4"], "4,096 at a time: 4 sequences"),
        (["ppo_micro_batch_size_per_gpu=4", "use_dynamic_bsz=true"], "16,384 at a time"),
        (["ppo_max_token_len_per_gpu=2000"], "2,000 at a time"),
    ],
)
def test_tokens_per_device(check: Callable[..., Checked], overrides: list[str], tokens: str) -> None:
    config = check(*(f"actor_rollout_ref.actor.{override}" for override in overrides)).config
    assert rows(render(config))["tokens per device at most"] == tokens


def test_a_limit_in_sequences_is_none_in_tokens(check: Callable[..., Checked]) -> None:
    actor, ref = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
    small = [f"{actor}.ppo_max_token_len_per_gpu=100", f"{ref}.log_prob_max_token_len_per_gpu=100"]
    assert check(*small, f"{actor}.ppo_micro_batch_size_per_gpu=1", f"{ref}.log_prob_micro_batch_size_per_gpu=1").config


def test_table_of_one_step_off(check: Callable[..., Checked]) -> None:
    checked = check("rollout.nnodes=2", "rollout.n_gpus_per_node=4", name="one_step_off_ppo_trainer")
    table = rows(render(checked.config, ["something"]))
    assert table["staleness"].startswith("1: ")
    assert table["rollout"] == "8 (still to be found): 2 nodes x 4"
    assert table["old log-probs"] == "the engine's"
    assert render(checked.config, ["something"]).endswith("note: something")


@pytest.mark.parametrize(
    ("overrides", "shape"),
    [
        ([], {"replica": 1, "fsdp": 8, "sequence": 1, "tensor": 1, "expert": 1}),
        (["replica=2", "sequence=2"], {"replica": 2, "fsdp": 2, "sequence": 2, "tensor": 1, "expert": 1}),
        (["replica=-1", "fsdp=4"], {"replica": 2, "fsdp": 4, "sequence": 1, "tensor": 1, "expert": 1}),
    ],
)
def test_mesh_agrees_with_the_sharding_part(
    check: Callable[..., Checked], overrides: list[str], shape: dict[str, int]
) -> None:
    from jaxrl_ppo.sharding import mesh, rules

    config = check(*(f"actor_rollout_ref.actor.mesh.{override}" for override in overrides)).config
    assert sizes.mesh_shape(config) == shape
    assert tuple(shape.values()) == mesh.mesh_shape(config.actor_rollout_ref.actor.mesh, 8)
    assert sizes.MESH_AXES == rules.MESH_AXES
    rows_axes = rules.ShardingRules().rows
    product = 1
    for axis in rows_axes:
        product *= shape[axis]
    assert sizes.batch_devices(config) == product
