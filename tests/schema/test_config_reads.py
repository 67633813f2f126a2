"""Every key has an effect: something reads it, or it is listed as doing nothing here, or as not built yet."""

from __future__ import annotations

import ast

from config_reads import Reads, keys_read
from schema_cases import ROOT

from jaxrl_ppo.schema import availability
from jaxrl_ppo.schema.coerce import fields_of, walk
from jaxrl_ppo.schema.config import ActorConfig, Config, OptimConfig
from jaxrl_ppo.schema.no_effect import CONDITIONAL

# Keys that act through others.
THROUGH_OTHERS = {
    "actor_rollout_ref.actor.clip_ratio": "the tree takes it for clip_ratio_low and clip_ratio_high",
    "actor_rollout_ref.rollout.nnodes": "sizes.rollout_replicas",
    "reward.reward_model.rollout.name": "rules_reward_model.judge_served",
    "rollout.nnodes": "derive.fill_in copies it",
    "rollout.n_gpus_per_node": "derive.fill_in copies it",
}


def section_of(path: str) -> type:
    section: type = Config
    for name in path.split(".")[:-1]:
        section = fields_of(section)[name][0]
    return section


def test_every_key_is_read_or_listed() -> None:
    found = keys_read(ROOT / "jaxrl_ppo")
    unread = [path for path, _, _ in walk() if (section_of(path), path.rpartition(".")[2]) not in found]
    assert [p for p in unread if not (p in THROUGH_OTHERS or p in CONDITIONAL or availability.is_missing(p))] == []


def test_keys_listed_as_acting_through_others_are_still_so() -> None:
    found = keys_read(ROOT / "jaxrl_ppo")
    assert [path for path in THROUGH_OTHERS if (section_of(path), path.rpartition(".")[2]) in found] == []


def test_types_are_followed() -> None:
    code = """
class A:
    def __init__(self, config: ActorRolloutRefConfig | None):
        self.actor, other = config.actor, config
        self.clip = getattr(other.actor, "clip_ratio")
    def f(self):
        return self.actor.optim.lr, self.unknown.tau_pos
def g(optim: "OptimConfig"):
    optim.clip_grad = 1.0
    return optim.betas
"""
    reads = Reads()
    reads.visit(ast.parse(code))
    keys = {(section, key) for section, key in reads.found if section in (ActorConfig, OptimConfig)}
    assert keys == {(ActorConfig, "clip_ratio"), (ActorConfig, "optim"), (OptimConfig, "lr"), (OptimConfig, "betas")}
