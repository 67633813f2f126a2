"""The compiled programs that every trained model has: gradients of micro-steps, summed, and the optimizer step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_ppo.models.decoder import Decoder
from jaxrl_ppo.models.parameters import abstract_params, flatten, is_adapter, nest, parameter_specs, to_state
from jaxrl_ppo.sharding.layout import Layout
from jaxrl_ppo.sharding.memory import in_host_memory
from jaxrl_ppo.training.head import gather_sources
from jaxrl_ppo.training.optimizer import apply_gradients

if TYPE_CHECKING:
    from jaxrl_ppo.models.architecture import DecoderConfig
    from jaxrl_ppo.training.packing import MicroStep

Tree = Any  # nested dict of arrays, like the parameters
Arrays = dict[str, jax.Array]

# How the arrays of a micro-step are laid out: rows [G * K, S] and slots [G, T].
ROWS = ("tokens", "positions", "segment_ids", "branch_ids")


def parameter_shardings(config: DecoderConfig, layout: Layout) -> Tree:
    """A nested dict like the parameters with the placement of each."""
    specs = parameter_specs(config)
    return nest({path: layout.sharding(spec.axes, spec.shape) for path, spec in specs.items()})


def decayed_parameters(config: DecoderConfig) -> Tree:
    """A nested dict like the trained parameters: True where weight decay applies, i.e. not to norms and biases."""
    specs = {path: path.rsplit(".", 1)[1] not in ("scale", "bias") for path in parameter_specs(config)}
    return trained_part(nest(specs), config)


def trained_part(tree: Tree, config: DecoderConfig) -> Tree:
    """Of a nested dict like the parameters, what is trained: all of it, or the LoRA adapter where there is one."""
    if config.lora is None:
        return tree
    return nest({path: leaf for path, leaf in flatten(tree) if is_adapter(path)})


def state_shardings(optimizer: optax.GradientTransformation, params: Tree, shardings: Tree, mesh: Mesh) -> Tree:
    """Placements of the optimizer's state: each moment where `shardings` have its parameter, counters everywhere."""
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

    With `offload_state`, the optimizer's moments rest in host memory, and only `apply` brings them to the devices.
    """

    _loss: Callable[..., tuple[jax.Array, tuple[Arrays, jax.Array]]]

    def __init__(
        self,
        model: DecoderConfig,
        optimizer: optax.GradientTransformation,
        max_norm: float,
        layout: Layout,
        *,
        dtype: Any,
        remat: str,
        attention: str,
        offload_state: bool,
    ):
        mesh = layout.mesh
        self.model, self.layout = model, layout
        self.dtype, self.remat, self.attention = dtype, remat, attention
        make = functools.partial(Decoder, model, dtype=dtype, remat=remat, attention=attention, layout=layout)
        self._graph = nnx.graphdef(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
        self.everywhere = everywhere = NamedSharding(mesh, PartitionSpec())
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self.parameter_shardings = parameter_shardings(model, layout)
        abstract = self.trained(self.abstract_params(jnp.float32))
        self.trained_shardings = self.trained(self.parameter_shardings)
        working = state_shardings(optimizer, abstract, self.trained_shardings, mesh)
        self.state_shardings = working
        if offload_state:
            resting = in_host_memory(self.trained_shardings)
            self.state_shardings = state_shardings(optimizer, abstract, resting, mesh)
        self.row_sharding = self.slot_sharding = layout.sharding(("rows", "length"))
        placed = (self.trained_shardings, everywhere)

        self.init_state = jax.jit(
            lambda params: optimizer.init(self.trained(params)), out_shardings=self.state_shardings
        )
        self.first_gradient = jax.jit(self._gradient, out_shardings=(*placed, everywhere))
        self.next_gradient = jax.jit(self._add_gradient, out_shardings=(*placed, everywhere), donate_argnums=(1, 2))
        self.no_gradient = jax.jit(
            lambda params: jax.tree.map(jnp.zeros_like, self.trained(params)), out_shardings=self.trained_shardings
        )
        # Whole parameters between the devices' memory and the hosts'.
        self.to_devices = jax.jit(lambda params: params, out_shardings=self.parameter_shardings)
        self.to_hosts = jax.jit(lambda params: params, out_shardings=in_host_memory(self.parameter_shardings))
        self.apply = jax.jit(
            functools.partial(self._apply, optimizer, max_norm, working if offload_state else None),
            out_shardings=(self.parameter_shardings, self.state_shardings, everywhere),
            donate_argnums=(0, 1),
            # Without it XLA:CPU copies both moments before it overwrites them.
            compiler_options={"xla_cpu_copy_insertion_use_region_analysis": True} if on_cpu else None,
        )

    def abstract_params(self, dtype: Any) -> Tree:
        """Shapes, types and placements of the parameters, nothing allocated."""
        leaves = {path: leaf.get_value() for path, leaf in flatten(abstract_params(self.model, dtype))}
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            nest(leaves),
            self.parameter_shardings,
        )

    def placements(
        self, step: MicroStep, columns: Mapping[str, np.ndarray]
    ) -> dict[str, tuple[np.ndarray, NamedSharding]]:
        """A micro-step's arrays by the names that the programs know them by, each with where it lies.

        `columns` are [B, T] over the batch that `step` was packed from.
        """
        rows = {name: getattr(step, name) for name in ROWS if getattr(step, name) is not None}
        slots = {name: getattr(step, name) for name in ("source", "target", "sequence")}
        slots |= {name: step.take(column) for name, column in columns.items()}
        placed = {name: (array, self.row_sharding) for name, array in rows.items()}
        return placed | {name: (array, self.slot_sharding) for name, array in slots.items()}

    def _sources(self, decoder: Any, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
        """The hidden state before each of a micro-step's targets, [G, T, D], every device having targets of its own.

        Also the load-balance loss of the micro-step's tokens, if the model has experts.
        """
        hidden, balance = decoder.hidden_and_balance(*(arrays.get(name) for name in ROWS))
        constrain = self.layout.constrain
        # It may lie on any device that has a part of its row.
        sources = gather_sources(constrain(hidden, "rows", None, "features"), arrays["source"])
        return constrain(sources, "rows", "length", "features"), balance

    def _decoder(self, params: Tree) -> Any:
        """The module with these parameters."""
        return nnx.merge(self._graph, to_state(dict(flatten(params)), self.model))

    def trained(self, tree: Tree) -> Tree:
        """`trained_part` of this model."""
        return trained_part(tree, self.model)

    def _apply(
        self,
        optimizer: optax.GradientTransformation,
        max_norm: float,
        fetched: Tree | None,
        params: Tree,
        state: Tree,
        grads: Tree,
    ) -> tuple[Tree, Tree, jax.Array]:
        if fetched is not None:
            state = jax.device_put(state, fetched)
        trained, state, norm = apply_gradients(optimizer, max_norm, self.trained(params), state, grads)
        return _with(params, trained), state, norm

    def _gradient(self, params: Tree, arrays: Arrays, *scalars: jax.Array) -> tuple[Tree, Arrays, jax.Array]:
        def loss(trained: Tree) -> tuple[jax.Array, tuple[Arrays, jax.Array]]:
            return self._loss(_with(params, trained), arrays, *scalars)

        grads, (sums, per_slot) = jax.grad(loss, has_aux=True)(self.trained(params))
        return grads, sums, per_slot

    def _add_gradient(
        self, params: Tree, grads: Tree, sums: Arrays, arrays: Arrays, *scalars: jax.Array
    ) -> tuple[Tree, Arrays, jax.Array]:
        *more, per_slot = self._gradient(params, arrays, *scalars)
        grads, sums = jax.tree.map(jnp.add, (grads, sums), tuple(more))
        return grads, sums, per_slot


def _with(params: Tree, trained: Tree) -> Tree:
    """The parameters with their trained part replaced."""
    return nest(dict(flatten(params)) | dict(flatten(trained)))
