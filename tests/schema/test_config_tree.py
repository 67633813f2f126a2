"""The Hydra tree and the schema say the same, and the tree composes as verl's users expect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from schema_cases import compose

from jaxrl_ppo.schema.coerce import walk
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.validate import Checked


def flat(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        full = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value:
            yield from flat(value, full)
        else:
            yield full, value


def test_tree_holds_every_key_with_its_default() -> None:
    raw, _ = compose([])
    assert dict(flat(raw)) == dict(flat(dataclasses.asdict(Config()))) | {
        "trainer.default_local_dir": "checkpoints/jaxrl_ppo/default"
    }


def test_one_step_off_differs_where_it_must() -> None:
    sync, one_step_off = dict(flat(compose([])[0])), dict(flat(compose([], "one_step_off_ppo_trainer")[0]))
    assert {key: value for key, value in one_step_off.items() if sync[key] != value} == {
        "trainer.mode": "one_step_off",
        "actor_rollout_ref.hybrid_engine": False,
        "algorithm.rollout_correction.bypass_mode": True,
        "rollout.nnodes": 1,
        "rollout.n_gpus_per_node": 8,
    }


def test_async_differs_from_one_step_off_where_it_must() -> None:
    one_step_off, asynchronous = (
        dict(flat(compose([], f"{name}_ppo_trainer")[0])) for name in ("one_step_off", "async")
    )
    assert {key: value for key, value in asynchronous.items() if one_step_off[key] != value} == {
        "trainer.mode": "async",
        "actor_rollout_ref.rollout.over_sample_rate": 1.0,
    }


def test_rollout_pool_of_one_step_off_is_copied(check: Callable[..., Checked]) -> None:
    config = check("rollout.nnodes=2", "rollout.n_gpus_per_node=4", name="one_step_off_ppo_trainer").config
    assert (config.actor_rollout_ref.rollout.nnodes, config.actor_rollout_ref.rollout.n_gpus_per_node) == (2, 4)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["data.max_prompt_length=100"], "actor_rollout_ref.rollout.prompt_length", 100),
        (["actor_rollout_ref.actor.clip_ratio=0.1"], "actor_rollout_ref.actor.clip_ratio_low", 0.1),
        (["actor_rollout_ref.actor.ppo_epochs=3"], "critic.ppo_epochs", 3),
        (["trainer.project_name=a", "trainer.experiment_name=b"], "trainer.default_local_dir", "checkpoints/a/b"),
        (["data.seed=${trainer.total_epochs}"], "data.seed", 30),
        (["+data.truncation=left"], "data.truncation", "left"),  # verl's recipes put + before keys that exist
        (["++data.truncation=left"], "data.truncation", "left"),
        (["trainer.logger=[console,wandb]"], "trainer.logger", ["console", "wandb"]),
        (['trainer.logger=["console","wandb"]'], "trainer.logger", ["console", "wandb"]),
        (
            ["+data.apply_chat_template_kwargs.enable_thinking=False"],
            "data.apply_chat_template_kwargs",
            {"enable_thinking": False},
        ),
        (
            ["actor_rollout_ref.actor.checkpoint.save_contents=[model]"],
            "actor_rollout_ref.actor.checkpoint.load_contents",
            ["model"],
        ),
    ],
)
def test_override(overrides: list[str], key: str, value: Any) -> None:
    node: Any = compose(overrides)[0]
    for name in key.split("."):
        node = node[name]
    assert node == value


def test_deleted_key_has_its_default(check: Callable[..., Checked]) -> None:
    assert check("~trainer.total_epochs").config.trainer.total_epochs == 30


def test_every_key_is_described() -> None:
    assert [path for path, _, info in walk() if not info.doc.endswith(".")] == []
