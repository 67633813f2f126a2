"""The device layer: which accelerator is here and what it can do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from device.chips import Chip, find_chip
from device.detect import (
    Found,
    Machine,
    choose,
    detect,
    kind_in_cluster,
    local_devices,
    require_plugin,
    visible_environment,
)
from device.install import pip_install
from device.kinds import KINDS, Capabilities, DeviceError, capabilities, jax_environment

__all__ = [
    "KINDS",
    "Capabilities",
    "Chip",
    "DeviceError",
    "Found",
    "Machine",
    "auto_set_device",
    "capabilities",
    "check_local_devices",
    "check_shareable",
    "choose",
    "detect",
    "find_chip",
    "jax_environment",
    "kind_in_cluster",
    "local_devices",
    "pip_install",
    "require_plugin",
    "visible_environment",
]


def auto_set_device(
    config: Any, *, resources: Mapping[str, float] | None = None, machine: Machine | None = None
) -> None:
    """Replace `auto` in `config.trainer.device` and `config.actor_rollout_ref.rollout.device` by the kind found.

    With `resources`, those of a Ray cluster, the cluster decides, and this machine otherwise. `config` is the
    configuration, as Hydra or as the schema has it. Raises DeviceError when devices are here that JAX cannot drive.
    """
    sections = (config.trainer, config.actor_rollout_ref.rollout)
    if any(section.device == "auto" for section in sections):
        kind = choose(machine).kind if resources is None else kind_in_cluster(resources)
        for section in sections:
            if section.device == "auto":
                section.device = kind


def check_local_devices(
    needs: Mapping[str, int], keys: str, *, jax_kinds: Collection[str] = (), machine: Machine | None = None
) -> None:
    """Raise DeviceError when this machine has fewer devices than `needs` (kind → count) says.

    Those of `jax_kinds` must have a JAX plugin too. `keys` names the configuration keys that ask for the devices.
    CPU devices are virtual, so there are always enough.
    """
    found = {here.kind: here for here in detect(machine)}
    for kind, count in needs.items():
        here = found.get(kind)
        have = here.count if here else 0
        if kind != "cpu" and have < count:
            raise DeviceError(
                f"{count} {kind.upper()} device(s) are needed here ({keys}), and this machine has {have}. Make the "
                f"pools smaller, join a Ray cluster (ray_kwargs.ray_init.address), or choose another trainer.device."
            )
        if here is not None and kind in jax_kinds:
            require_plugin(here)


def check_shareable(kind: str, key: str) -> None:
    """Raise DeviceError unless two processes may have the same device of `kind`, as `key` asks for."""
    if not capabilities(kind).shareable:
        raise DeviceError(
            f"{key}: trainer and rollout cannot take turns on the same {kind.upper()} devices, which belong to one "
            f"process at a time; set {key.partition('=')[0]}=false and give the rollout devices of its own, "
            "rollout.nnodes x n_gpus_per_node."
        )
