"""A mesh with its rules: what model and training code pins activations with, and runs single-device kernels under."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from jaxrl_ppo.sharding.rules import MeshAxes, ShardingRules, axis_size


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where arrays lie on `mesh` under `rules`. Hashable, so that it may be part of a compiled function's identity."""

    mesh: Mesh
    rules: ShardingRules = dataclasses.field(default_factory=ShardingRules)

    def sharding(self, logical: Sequence[str | None], shape: Sequence[int] | None = None) -> NamedSharding:
        """Placement of an array whose axes are called `logical`, as `ShardingRules.sharding` has it."""
        return self.rules.sharding(self.mesh, logical, shape)

    def constrain(self, x: jax.Array, *logical: str | None) -> jax.Array:
        """`x`, inside a compiled function, pinned to where its logical axes say; its gradient likewise."""
        return jax.lax.with_sharding_constraint(x, self.sharding(logical, x.shape))

    def gather(self, x: jax.Array, lies: Sequence[str | None], wanted: Sequence[str | None]) -> jax.Array:
        """`x`, whose axes are called `lies`, brought to where `wanted` says; its gradient back to where `x` lies.

        Under `constrain` alone the gradient would be summed up whole on every device before each keeps its part.
        """

        @jax.custom_vjp
        def gathered(x: jax.Array) -> jax.Array:
            return self.constrain(x, *wanted)

        gathered.defvjp(lambda x: (gathered(x), None), lambda _, gradient: (self.constrain(gradient, *lies),))
        return gathered(x)

    def axes(self, logical: Sequence[str | None], shape: Sequence[int] | None = None) -> tuple[MeshAxes, ...]:
        """The mesh axes that each dimension of such an array is split over."""
        parts = self.sharding(logical, shape).spec
        return tuple((part,) if isinstance(part, str) else tuple(part or ()) for part in parts)

    def pieces(self, *logical: str) -> int:
        """How many pieces the axes called `logical` are cut into, taken together."""
        axes: MeshAxes = tuple(axis for name in logical for axis in getattr(self.rules, name))
        return axis_size(self.mesh, axes)
