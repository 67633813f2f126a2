"""The device mesh of a trainer: five named axes over all devices of all its processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from jax.sharding import AxisType, Mesh

from jaxrl_ppo.sharding.rules import MESH_AXES, ShardingError

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import MeshConfig

KEY = "actor_rollout_ref.actor.mesh"


def mesh_shape(config: MeshConfig, device_count: int) -> tuple[int, ...]:
    """Sizes of the axes in the order of MESH_AXES; one axis of -1 takes the devices that the others leave.

    Raises ShardingError, naming the keys, when the sizes do not multiply to `device_count`.
    """
    sizes = {axis: int(getattr(config, axis)) for axis in MESH_AXES}
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            raise ShardingError(f"{KEY}.{axis}={size}: must be positive, or -1 for the devices that remain")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ShardingError(f"{' and '.join(f'{KEY}.{axis}' for axis in open_axes)} are both -1: only one may be")
    others = math.prod(size for size in sizes.values() if size > 0)
    asked = ", ".join(f"{KEY}.{axis}={size}" for axis, size in sizes.items() if size > 1) or f"all of {KEY} at 1"
    if device_count % others or (not open_axes and others != device_count):
        needed = f"a multiple of {others}" if open_axes else f"exactly {others}"
        raise ShardingError(f"{asked}: these need {needed} devices, the trainer has {device_count}")
    for axis in open_axes:
        sizes[axis] = device_count // others
    return tuple(sizes[axis] for axis in MESH_AXES)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh over `devices` (default: all of the program's, over all processes), laid out for the hardware's topology.

    All axes are of type Auto: the compiler propagates shardings from parameters and inputs, and the code pins them
    with constraints where it knows better. Raises ShardingError as `mesh_shape` does.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices))
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices)
