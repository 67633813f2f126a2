"""What is not built yet. One table; building a feature deletes its lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_ppo.schema.coerce import default_of, walk
from jaxrl_ppo.schema.faults import Fault, show
from jaxrl_ppo.schema.legacy import lookup, remove


@dataclasses.dataclass(frozen=True, slots=True)
class Missing:
    """Values of `key` that are not available, or, where `only` is given, all others."""

    key: str
    what: str
    values: tuple[Any, ...] = ()
    only: tuple[Any, ...] = ()

    def refuses(self, value: Any) -> bool:
        """Whether `value` needs what is missing."""
        return value in self.values if self.values else value not in self.only


_ROLLOUT = "actor_rollout_ref.rollout"

MISSING = (
    Missing("actor_rollout_ref.model.hf_config_path", "a config.json from elsewhere", only=(None,)),
    Missing("actor_rollout_ref.model.override_config", "changes to config.json", only=({},)),
    Missing("actor_rollout_ref.model.external_lib", "external libraries", only=(None,)),
    Missing(f"{_ROLLOUT}.multi_turn.interaction_config_path", "simulated users", only=(None,)),
    Missing(f"{_ROLLOUT}.skip_rollout", "skipping rollouts", only=(None, False)),
    Missing(f"{_ROLLOUT}.quantization", "quantised rollouts", only=(None,)),
    Missing(f"{_ROLLOUT}.quantization_config_file", "quantised rollouts", only=(None,)),
    Missing(f"{_ROLLOUT}.enable_rollout_routing_replay", "router replay", only=(None, False)),
    Missing("actor_rollout_ref.actor.router_replay.mode", "router replay", only=(None, "disabled")),
    Missing("actor_rollout_ref.model.mtp.enable", "multi-token prediction", only=(None, False)),
    Missing(
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "a pipeline-parallel trainer; actor.mesh.fsdp spreads layers over devices",
        only=(None, 1),
    ),
    Missing("data.datagen.path", "generated data", only=(None,)),
)


def refuse_missing(raw: Mapping[str, Any]) -> list[Fault]:
    """A fault for each key of `raw` that asks for something not built yet."""
    infos = {path: info for path, _, info in walk()}
    missing_values: dict[str, set[Any]] = {}
    for entry in MISSING:
        missing_values.setdefault(entry.key, set()).update(entry.values)
    faults = []
    for entry in MISSING:
        value = lookup(raw, entry.key)
        if value is None:
            value = default_of(entry.key)
        if not entry.refuses(value):
            continue
        choices = infos[entry.key].choices if entry.key in infos else ()
        allowed = entry.only or tuple(choice for choice in choices if choice not in missing_values[entry.key])
        text = f"{entry.key}={show(value)}: not available yet ({entry.what}); available: "
        faults.append(Fault((entry.key,), text + ", ".join(show(choice) for choice in allowed) + "."))
    return faults


def drop_foreign_switches(raw: dict[str, Any]) -> None:
    """Remove, in place, the switches of MISSING that are no keys of the schema, and what they set up."""
    schema = {path for path, _, _ in walk()}
    for entry in MISSING:
        if entry.key not in schema:
            section, _, name = entry.key.rpartition(".")
            alone = name in ("mode", "enable", "path")  # the section is the feature's own
            remove(raw, section if alone else entry.key)


def is_missing(path: str) -> bool:
    """Whether the key `path` is that of something that is not built yet."""
    return any(path == entry.key for entry in MISSING)
