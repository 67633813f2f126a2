"""Routed experts: each token's few, computed by ragged matrix products, on one device or spread over a mesh.

Over the mesh's expert axis, devices first collect one another's tokens, then each computes what goes to its own
experts, and the sums travel back: no token is ever dropped, whatever the load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.sharding.layout import Layout
from jaxrl_ppo.sharding.rules import MeshAxes

Activation = Callable[[jax.Array], jax.Array]
PROJECTIONS = {
    "gate": ("expert", "embed", "mlp"),
    "up": ("expert", "embed", "mlp"),
    "down": ("expert", "mlp", "embed"),
}


class Routing(NamedTuple):
    """Of every token, the router's probabilities [R, S, E] float32 and the experts it went to [R, S, k]."""

    probabilities: jax.Array
    chosen: jax.Array


class Load(NamedTuple):
    """Sums over tokens: probabilities and assignments of each expert [E], and the number of tokens."""

    probabilities: jax.Array
    assignments: jax.Array
    tokens: jax.Array


def expert_block(
    x: jax.Array,
    params: Mapping[str, Any],
    config: DecoderConfig,
    activation: Activation,
    layout: Layout | None,
) -> tuple[jax.Array, Routing]:
    """The weighted sum of each token's experts (Shazeer et al. 2017, arXiv:1701.06538): x [R, S, D] -> [R, S, D]."""
    router = params["router"]["kernel"].astype(x.dtype)
    if layout is not None:  # every device routes its own rows to all experts
        router = layout.constrain(router, None, None)
    logits = jnp.matmul(x, router, preferred_element_type=jnp.float32)
    probabilities = jax.nn.softmax(logits, axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, config.experts_per_token)
    if config.normalise_experts:
        weights = weights / weights.sum(-1, keepdims=True)
    kernels = {name: params[name]["kernel"].astype(x.dtype) for name in PROJECTIONS}
    if layout is None:
        out = _compute(x, weights, chosen, kernels, activation, 0)
    else:
        out = _spread(x, weights, chosen, kernels, activation, layout)
    return out, Routing(probabilities, chosen)


def routed_load(routing: Routing, counted: jax.Array) -> Load:
    """What a layer's experts got of the tokens `counted` (bool [R, S])."""
    counted = counted.astype(jnp.float32)
    experts = routing.probabilities.shape[-1]
    hits = jax.nn.one_hot(routing.chosen, experts, dtype=jnp.float32).sum(-2)
    return Load(
        jnp.einsum("rse,rs->e", routing.probabilities, counted), jnp.einsum("rse,rs->e", hits, counted), counted.sum()
    )


def balance_loss(load: Load) -> jax.Array:
    """The load-balance loss, a scalar: experts * sum of (share of tokens * mean probability).

    Equations 4 to 6 of Fedus et al. 2021 (arXiv:2101.03961), over all layers at once as in transformers; `load` is the
    layers' sum. It is `experts_per_token` when the load is even.
    """
    tokens = jnp.maximum(load.tokens, 1)
    experts = load.assignments.shape[-1]
    return experts * jnp.sum(load.assignments / tokens * (load.probabilities / tokens))


def _compute(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    kernels: Mapping[str, jax.Array],
    activation: Activation,
    first: jax.Array | int,
) -> jax.Array:
    """The part of the sum that experts `first`, `first` + 1, … have in it; kernels hold those."""
    rows, length, width = x.shape
    per_token, here = chosen.shape[-1], kernels["gate"].shape[0]
    expert = chosen.reshape(-1) - first
    expert = jnp.where((expert >= 0) & (expert < here), expert, here)  # those elsewhere come last
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.bincount(expert, length=here).astype(jnp.int32)
    # A ragged product leaves what it likes in rows behind its last group, going forward and back.
    mine = (expert[order] < here)[:, None]
    inputs = jnp.where(mine, x.reshape(-1, width)[order // per_token], 0)
    gate, up = (jax.lax.ragged_dot(inputs, kernels[name], sizes) for name in ("gate", "up"))
    inner = jnp.where(mine, activation(gate) * up, 0)
    out = jnp.where(mine, jax.lax.ragged_dot(inner, kernels["down"], sizes), 0)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    out = out[back].reshape(-1, per_token, width) * weights.reshape(-1, per_token, 1).astype(x.dtype)
    return out.sum(1).reshape(rows, length, width)


def _spread(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    kernels: Mapping[str, jax.Array],
    activation: Activation,
    layout: Layout,
) -> jax.Array:
    tokens = layout.sharding(("rows", "length", None)).spec
    specs = {name: layout.sharding(axes, kernels[name].shape).spec for name, axes in PROJECTIONS.items()}
    expert, embed, mlp = (axes or () for axes in specs["gate"])

    def gathered(array: jax.Array, axes: MeshAxes, dimension: int) -> jax.Array:
        return jax.lax.all_gather(array, axes, axis=dimension, tiled=True) if axes else array

    def local(x: jax.Array, weights: jax.Array, chosen: jax.Array, kernels: Mapping[str, jax.Array]) -> jax.Array:
        # Gathered here and not before, the gradients of the kernels are scattered as they are summed.
        whole = {name: gathered(kernel, embed, PROJECTIONS[name].index("embed")) for name, kernel in kernels.items()}
        first = jax.lax.axis_index(expert) * whole["gate"].shape[0] if expert else 0
        x, weights, chosen = (gathered(array, expert, 0) for array in (x, weights, chosen))
        out = _compute(x, weights, chosen, whole, activation, first)
        out = jax.lax.psum(out, mlp) if mlp else out
        return jax.lax.psum_scatter(out, expert, scatter_dimension=0, tiled=True) if expert else out

    spread = jax.shard_map(local, mesh=layout.mesh, in_specs=(tokens, tokens, tokens, specs), out_specs=tokens)
    return spread(x, weights, chosen, kernels)
