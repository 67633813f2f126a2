"""The compiled programs that every trained model has: gradients of micro-steps, summed, and the optimizer step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_ppo.models.decoder import Decoder
from jaxrl_ppo.models.parameters import abstract_params, flatten, nest, parameter_specs, to_state
from jaxrl_ppo.sharding.rules import ShardingRules
from jaxrl_ppo.training.optimizer import apply_gradients

if TYPE_CHECKING:
    from jaxrl_ppo.models.architecture import DecoderConfig

Tree = Any  # nested dict of arrays, like the parameters
Arrays = dict[str, jax.Array]

# How the arrays of a micro-step are laid out: rows [G * K, S] and slots [G, T].
ROWS = ("tokens", "positions", "segment_ids", "branch_ids")


def parameter_shardings(config: DecoderConfig, mesh: Mesh, rules: ShardingRules) -> Tree:
    """A nested dict like the parameters with the placement of each."""
    specs = parameter_specs(config)
    return nest({path: rules.sharding(mesh, spec.axes, spec.shape) for path, spec in specs.items()})


def decayed_parameters(config: DecoderConfig) -> Tree:
    """A nested dict like the parameters: True where weight decay applies, i.e. not to norms and biases."""
    return nest({path: path.rsplit(".", 1)[1] not in ("scale", "bias") for path in parameter_specs(config)})


def state_shardings(optimizer: optax.GradientTransformation, params: Tree, shardings: Tree, mesh: Mesh) -> Tree:
    """Placements of the optimizer's state: each moment lies as its parameter does, counters everywhere."""
    state = jax.eval_shape(optimizer.init, params)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, state, shardings, transform_non_params=lambda _: everywhere
    )


class ModelPrograms:
    """Jitted functions of one model on one mesh. They hold no state: parameters go in and come out.

    `arrays` are a micro-step's: rows, slots, and its columns. Shapes are those of `training/packing.py`. Each kind of
    model defines `_loss(params, arrays, *scalars)`: a micro-step's part of the mini-batch's loss; its parts of the
    metrics, which are sums; one value per slot.
    """

    _loss: Callable[..., tuple[jax.Array, tuple[Arrays, jax.Array]]]

    def __init__(
        self,
        model: DecoderConfig,
        optimizer: optax.GradientTransformation,
        max_norm: float,
        mesh: Mesh,
        rules: ShardingRules,
        *,
        dtype: Any,
        remat: str,
        attention: str,
    ):
        self.model, self.mesh, self.rules = model, mesh, rules
        make = functools.partial(Decoder, model, dtype=dtype, remat=remat, attention=attention)
        self._graph = nnx.graphdef(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
        self.everywhere = everywhere = NamedSharding(mesh, PartitionSpec())
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self.parameter_shardings = parameter_shardings(model, mesh, rules)
        abstract = nest({path: leaf.get_value() for path, leaf in flatten(abstract_params(model))})
        self.state_shardings = state_shardings(optimizer, abstract, self.parameter_shardings, mesh)
        self.row_sharding = NamedSharding(mesh, rules.spec(("rows", "length")))
        self.slot_sharding = NamedSharding(mesh, rules.spec(("rows", None)))
        placed = (self.parameter_shardings, everywhere)

        self.init_state = jax.jit(optimizer.init, out_shardings=self.state_shardings)
        self.first_gradient = jax.jit(self._gradient, out_shardings=(*placed, everywhere))
        self.next_gradient = jax.jit(self._add_gradient, out_shardings=(*placed, everywhere), donate_argnums=(1, 2))
        self.no_gradient = jax.jit(
            functools.partial(jax.tree.map, jnp.zeros_like), out_shardings=self.parameter_shardings
        )
        self.apply = jax.jit(
            functools.partial(apply_gradients, optimizer, max_norm),
            out_shardings=(self.parameter_shardings, self.state_shardings, everywhere),
            donate_argnums=(0, 1),
            # Without it XLA:CPU copies both moments before it overwrites them.
            compiler_options={"xla_cpu_copy_insertion_use_region_analysis": True} if on_cpu else None,
        )

    def _decoder(self, params: Tree) -> Any:
        """The module with these parameters."""
        return nnx.merge(self._graph, to_state(dict(flatten(params)), self.model))

    def _gradient(self, params: Tree, arrays: Arrays, *scalars: jax.Array) -> tuple[Tree, Arrays, jax.Array]:
        grads, (sums, per_slot) = jax.grad(self._loss, has_aux=True)(params, arrays, *scalars)
        return grads, sums, per_slot

    def _add_gradient(
        self, params: Tree, grads: Tree, sums: Arrays, arrays: Arrays, *scalars: jax.Array
    ) -> tuple[Tree, Arrays, jax.Array]:
        *more, per_slot = self._gradient(params, arrays, *scalars)
        grads, sums = jax.tree.map(jnp.add, (grads, sums), tuple(more))
        return grads, sums, per_slot
