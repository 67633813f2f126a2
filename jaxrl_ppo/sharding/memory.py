"""Arrays that rest in the host's memory while no program needs them: where the devices can fetch them by themselves."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxrl_ppo.sharding.rules import ShardingError

HOST = "pinned_host"  # JAX's name of that memory


def in_host_memory(shardings: Any) -> Any:
    """A tree of placements, each in the memory of the hosts whose devices it names."""
    return jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST), shardings)


def on_device(sharding: NamedSharding | None) -> bool:
    """Whether arrays placed so take memory of the devices; without a placement they do."""
    return sharding is None or sharding.memory_kind != HOST


def check_host_memory(mesh: Mesh, key: str) -> None:
    """Raise ShardingError, naming the configuration's `key`, where the mesh's devices cannot reach their host's."""
    first = mesh.local_devices[0] if mesh.local_devices else mesh.devices.flat[0]
    kinds = [memory.kind for memory in first.addressable_memories()]
    if HOST not in kinds:
        raise ShardingError(
            f"{key}=true: devices of kind {first.device_kind!r} have no memory {HOST!r} under JAX, only "
            f"{', '.join(kinds)}: set it to false"
        )
