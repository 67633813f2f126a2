"""Other spellings of a key in verl recipes, old and current, rewritten to the one the schema has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxrl_ppo.schema.coerce import default_of
from jaxrl_ppo.schema.faults import Fault, show

_ACTOR = "actor_rollout_ref.actor"
_FSDP_SIZE = f"{_ACTOR}.fsdp_config.fsdp_size"

SPELLINGS = {
    f"{_ACTOR}.grad_clip": f"{_ACTOR}.optim.clip_grad",
    f"{_ACTOR}.ulysses_sequence_parallel_size": f"{_ACTOR}.mesh.sequence",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{_ACTOR}.mesh.sequence",
    _FSDP_SIZE: f"{_ACTOR}.mesh.fsdp",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.lr_decay_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.megatron.tensor_model_parallel_size": f"{_ACTOR}.mesh.tensor",
    f"{_ACTOR}.megatron.context_parallel_size": f"{_ACTOR}.mesh.sequence",
    f"{_ACTOR}.megatron.expert_model_parallel_size": f"{_ACTOR}.mesh.expert",
    f"{_ACTOR}.megatron.param_offload": f"{_ACTOR}.fsdp_config.param_offload",
    f"{_ACTOR}.megatron.optimizer_offload": f"{_ACTOR}.fsdp_config.optimizer_offload",
    "actor_rollout_ref.ref.megatron.param_offload": "actor_rollout_ref.ref.fsdp_config.param_offload",
    "actor_rollout_ref.model.lora.rank": "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.lora.alpha": "actor_rollout_ref.model.lora_alpha",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "data.trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
}

# Where the reward settings used to be. A section's keys keep their names below it.
REWARD_SPELLINGS = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_manager": "reward.reward_manager",
    "sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.overlong_buffer": "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.enable_resource_pool": "reward.reward_model.enable_resource_pool",
    "reward_model.n_gpus_per_node": "reward.reward_model.n_gpus_per_node",
    "reward_model.nnodes": "reward.reward_model.nnodes",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.rollout": "reward.reward_model.rollout",
    "reward_model.forward_max_token_len_per_gpu": "reward.reward_model.forward_max_token_len_per_gpu",
}


def migrate_spellings(raw: dict[str, Any], given: Collection[str], faults: list[Fault], notes: list[str]) -> None:
    """Rewrite `raw` in place to the schema's spellings; `notes` gets a line per key rewritten.

    `given` are the keys that the command line set; other keys count as given where they differ from the default. A
    key given in two spellings with different values is a fault.
    """
    replica = f"{_ACTOR}.mesh.replica"
    size = lookup(raw, _FSDP_SIZE)
    if size == -1:
        remove(raw, _FSDP_SIZE)
    elif size is not None and replica not in given and lookup(raw, replica) in (None, 1):
        assign(raw, replica, -1)  # verl makes as many copies as the devices allow
    _migrate(raw, SPELLINGS, given, faults, notes)


def migrate_legacy_reward_impl(
    raw: dict[str, Any], given: Collection[str] = (), faults: list[Fault] | None = None, notes: list[str] | None = None
) -> dict[str, Any]:
    """Move verl's older reward keys below `reward`, in place, as `migrate_spellings` does; returns `raw`."""
    if isinstance(raw.get("reward_manager"), str):
        raw["reward_manager"] = {"name": raw["reward_manager"]}
    _migrate(raw, REWARD_SPELLINGS, given, [] if faults is None else faults, [] if notes is None else notes)
    return raw


def lookup(raw: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    node: Any = raw
    for name in path.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(name)
    return node


def assign(raw: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, making sections on the way."""
    *sections, name = path.split(".")
    for section in sections:
        if not isinstance(raw.get(section), dict):
            raw[section] = {}
        raw = raw[section]
    raw[name] = value


def remove(raw: dict[str, Any], path: str) -> None:
    """Remove a key, and the sections that are then empty."""
    name, _, rest = path.partition(".")
    if rest and isinstance(raw.get(name), dict):
        remove(raw[name], rest)
    if not rest or raw.get(name) == {}:
        raw.pop(name, None)


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(full path, value) of every key at or below `path`; an empty mapping is a value."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from leaves(below, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _migrate(
    raw: dict[str, Any], spellings: Mapping[str, str], given: Collection[str], faults: list[Fault], notes: list[str]
) -> None:
    for old_root, new_root in spellings.items():
        found = list(leaves(lookup(raw, old_root), old_root))
        remove(raw, old_root)
        for old, value in found:
            if value is None or value == {}:
                continue
            new = new_root + old.removeprefix(old_root)
            present, default = lookup(raw, new), default_of(new)
            new_is_given = new in given or (present is not None and present != default)
            if new_is_given and present != value:
                if old in given or value != default:
                    text = f"{old}={show(value)} and {new}={show(present)} are two spellings of one key: give one."
                    faults.append(Fault((old, new), text))
                continue
            assign(raw, new, value)
            notes.append(f"{old} is read as {new}")
