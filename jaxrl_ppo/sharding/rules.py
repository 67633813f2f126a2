"""Where every array lives: one table from logical axis names to mesh axes, and the placements that follow from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("replica", "fsdp", "sequence", "tensor", "expert")

MeshAxes = tuple[str, ...]


class ShardingError(ValueError):
    """A placement that cannot be: a mesh axis used twice, an axis nobody knows, a size that does not divide."""


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> the mesh axes it is split over; () keeps it whole on every device.

    The first group names parameter axes (see `models/`), the second the axes of activations. The expert axis splits
    rows too: outside the expert layers it is one more data-parallel axis.
    """

    layers: MeshAxes = ()
    vocab: MeshAxes = ("tensor",)
    embed: MeshAxes = ("fsdp", "sequence")
    heads: MeshAxes = ("tensor",)
    kv_heads: MeshAxes = ("tensor",)
    head_dim: MeshAxes = ()
    mlp: MeshAxes = ("tensor",)
    expert: MeshAxes = ("expert",)
    labels: MeshAxes = ()
    rank: MeshAxes = ()

    rows: MeshAxes = ("replica", "fsdp", "expert")
    length: MeshAxes = ("sequence",)
    features: MeshAxes = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            axes = getattr(self, field.name)
            for axis in axes:
                if axis not in MESH_AXES:
                    raise ShardingError(
                        f"sharding rule {field.name!r}: unknown mesh axis {axis!r} (known: {', '.join(MESH_AXES)})"
                    )
            if len(set(axes)) < len(axes):
                raise ShardingError(f"sharding rule {field.name!r} names a mesh axis twice: {axes}")

    def spec(self, logical: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array whose dimensions are called `logical` (None: unnamed, kept whole).

        Raises ShardingError for an unknown name and when two dimensions would be split over the same mesh axis.
        """
        used: dict[str, str] = {}
        parts: list[MeshAxes | None] = []
        for name in logical:
            if name is None:
                parts.append(None)
                continue
            axes = getattr(self, name, None)
            if not isinstance(axes, tuple):
                known = ", ".join(field.name for field in dataclasses.fields(self))
                raise ShardingError(f"unknown logical axis {name!r} in {tuple(logical)} (known: {known})")
            for axis in axes:
                if axis in used:
                    raise ShardingError(
                        f"array with axes {tuple(logical)}: {used[axis]!r} and {name!r} are both split over the mesh "
                        f"axis {axis!r}"
                    )
                used[axis] = name
            parts.append(axes or None)
        return PartitionSpec(*parts)

    def sharding(self, mesh: Mesh, logical: Sequence[str | None], shape: Sequence[int] | None = None) -> NamedSharding:
        """`spec` on `mesh`. With `shape`, a dimension is split over only as many of its mesh axes as divide it.

        That happens to few and small dimensions (three key/value heads over a tensor axis of four): the array is then
        replicated along that axis, which costs memory and never correctness.
        """
        spec = self.spec(logical)
        if shape is None:
            return NamedSharding(mesh, spec)
        if len(shape) != len(logical):
            raise ShardingError(f"an array of shape {tuple(shape)} cannot have the axes {tuple(logical)}")
        parts = [part if part is None else _dividing(mesh, part, size) for part, size in zip(spec, shape)]
        return NamedSharding(mesh, PartitionSpec(*parts))


def _dividing(mesh: Mesh, axes: MeshAxes | str, size: int) -> MeshAxes | None:
    """The first of `axes` that together divide `size`; None if not even the first does."""
    axes = (axes,) if isinstance(axes, str) else tuple(axes)  # a PartitionSpec writes one axis as its name
    while axes and size % axis_size(mesh, axes):
        axes = axes[:-1]
    return axes or None


def axis_size(mesh: Mesh, axes: MeshAxes | str) -> int:
    """Number of pieces a dimension split over `axes` of `mesh` has."""
    shape: Mapping[str, int] = mesh.shape
    return math.prod(shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
