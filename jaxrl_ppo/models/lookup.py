"""Embedding lookup on a mesh: a device looks up its columns for all who share them, and they exchange the results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_ppo.sharding.layout import Layout


def spread_lookup(tokens: jax.Array, table: jax.Array, dtype: Any, layout: Layout) -> jax.Array:
    """Rows of `table` [V, D] for tokens int [R, S], in `dtype`, as the residual stream lies: [R, S, D].

    Devices that hold different columns of the table collect one another's tokens, look up what they have of them, and
    turn columns into rows by an all-to-all; on the way back likewise. That moves the embeddings once. The compiler,
    left alone, gathers them or the table whole on every device, on any mesh with more than one of these axes.
    """
    rows, length = layout.axes(("rows", "length"))
    vocabulary, columns = layout.axes(("vocab", "embed"), table.shape)
    dimension = dict.fromkeys(rows, 0) | dict.fromkeys(length, 1)

    def local(tokens: jax.Array, table: jax.Array) -> jax.Array:
        for axis in columns:
            tokens = jax.lax.all_gather(tokens, axis, axis=dimension[axis], tiled=True)
        if vocabulary:
            tokens = tokens - jax.lax.axis_index(vocabulary) * table.shape[0]
        here = (tokens >= 0) & (tokens < table.shape[0])
        x = jnp.where(here[..., None], table[jnp.where(here, tokens, 0)], 0).astype(dtype)
        x = jax.lax.psum(x, vocabulary) if vocabulary else x
        for axis in reversed(columns):
            x = jax.lax.all_to_all(x, axis, split_axis=dimension[axis], concat_axis=2, tiled=True)
        return x

    by_token = layout.sharding(("rows", "length")).spec
    by_table = layout.sharding(("vocab", "embed"), table.shape).spec
    out = layout.sharding(("rows", "length", None)).spec
    return jax.shard_map(local, mesh=layout.mesh, in_specs=(by_token, by_table), out_specs=out)(tokens, table)
