"""Grouped-query attention over packed rows, in plain XLA: the reference that every kernel is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a padding token's row of only masked scores gives no NaN


def packed_mask(segment_ids: jax.Array, branch_ids: jax.Array | None) -> jax.Array:
    """Which token sees which, bool [R, S, S] (query, key), from segment and branch ids [R, S].

    A token sees earlier tokens and itself where the segment is the same and not 0 (padding). With branches, it sees
    its segment's branch 0 (the shared prompt) and its own branch (one response), not the others.
    """
    length = segment_ids.shape[1]
    position = jnp.arange(length)
    query, key = segment_ids[:, :, None], segment_ids[:, None, :]
    mask = (position[:, None] >= position[None, :]) & (query == key) & (key != 0)
    if branch_ids is not None:
        query, key = branch_ids[:, :, None], branch_ids[:, None, :]
        mask &= (key == 0) | (key == query)
    return mask


def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    """Softmax attention: query [R, S, H, hd], key and value [R, T, K, hd], mask [R, S, T] -> [R, S, H, hd].

    H is a multiple of K; each key head serves H / K neighbouring query heads and is never repeated in memory.
    Scores and softmax are float32.
    """
    rows, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("rskgd,rtkd->rkgst", grouped * scale, key, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    out = jnp.einsum("rkgst,rtkd->rskgd", weights, value)
    return out.reshape(rows, length, heads, head_dim)
