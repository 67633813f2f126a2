"""Grouped-query attention over packed rows, in plain XLA: the reference that every kernel is compared with."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a padding token's row of only masked scores gives no NaN
MIN_CHUNK, MAX_CHUNKS = 64, 8
DENSE_MASK = 2048  # rows up to this long have their mask made once a pass; longer ones chunk by chunk in every layer

# dot_general dimensions for [R, K, m, k] x [R, K, n, k], [R, K, m, k] x [R, K, k, n] and [R, K, k, m] x [R, K, k, n]
_NT = (((3,), (3,)), ((0, 1), (0, 1)))
_NN = (((3,), (2,)), ((0, 1), (0, 1)))
_TN = (((2,), (2,)), ((0, 1), (0, 1)))


class Rows(NamedTuple):
    """What packed rows hold, as far as attention has to know: int [R, S] each, `branch_ids` None without branches."""

    positions: jax.Array
    segment_ids: jax.Array
    branch_ids: jax.Array | None = None


def packed_mask(
    rows: Rows, window: int | None = None, queries: slice = slice(None), keys: slice = slice(None)
) -> jax.Array:
    """Which token sees which, bool [R, S, S] (query, key), or the part of it that the two slices cut out.

    A token sees earlier tokens and itself where the segment is the same and not 0 (padding). With branches, it sees
    its segment's branch 0 (the shared prompt) and its own branch (one response), not the others. With a `window`, it
    sees no token that is `window` or more positions behind it.
    """
    column = jnp.arange(rows.segment_ids.shape[1])
    query, key = rows.segment_ids[:, queries, None], rows.segment_ids[:, None, keys]
    mask = (column[queries, None] >= column[keys]) & (query == key) & (key != 0)
    if rows.branch_ids is not None:
        query, key = rows.branch_ids[:, queries, None], rows.branch_ids[:, None, keys]
        mask &= (key == 0) | (key == query)
    if window is not None:
        # Positions, not columns: another response may lie between a token and its prompt.
        mask &= rows.positions[:, queries, None] - rows.positions[:, None, keys] < window
    return mask


def mask_bias(mask: jax.Array) -> jax.Array:
    """What a mask adds to attention scores: 0 where seen, a large negative number where not, float32."""
    return jnp.where(mask, 0.0, MASKED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seen: Rows | jax.Array,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Softmax attention of rows onto themselves: query [R, S, H, hd], key and value [R, S, K, hd] -> [R, S, H, hd].

    `seen` are the rows, whose mask is then made chunk by chunk, or the mask's bias [R, S, S] itself, float32, `window`
    included; what lies above its diagonal is taken as masked and most of it never computed. H is a multiple of K; each
    key head serves H / K neighbouring query heads and is never repeated in memory. With `soft_cap`, scores are
    soft_cap * tanh(score / soft_cap) (Gemma 2, arXiv:2408.00118). Softmax is float32. Queries go chunk by chunk, and
    the backward pass computes the weights again from the saved log-normaliser (Dao et al. 2022, arXiv:2205.14135), so
    that no [S, S] weights outlive a layer.
    """
    return _forward(query, key, value, seen, scale, window, soft_cap)[0]


class _Residuals(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    seen: Rows | jax.Array
    out: jax.Array
    log_normaliser: jax.Array  # [R, K, G, S, 1]


def _chunks(length: int) -> list[tuple[int, int]]:
    size = max(MIN_CHUNK, -(-length // MAX_CHUNKS))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _group(x: jax.Array, kv_heads: int) -> jax.Array:
    """[R, S, H, hd] -> [R, K, G, S, hd]: query heads under the key head that serves them."""
    rows, length, heads, head_dim = x.shape
    return x.reshape(rows, length, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)


def _ungroup(x: jax.Array) -> jax.Array:
    rows, kv_heads, groups, length, head_dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(rows, length, kv_heads * groups, head_dim)


def _merge(x: jax.Array) -> jax.Array:
    """[R, K, G, s, n] -> [R, K, G * s, n]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _bias(seen: Rows | jax.Array, start: int, stop: int, window: int | None) -> jax.Array:
    """The mask's bias of queries start..stop to keys 0..stop: [R, stop - start, stop]."""
    if isinstance(seen, Rows):
        return mask_bias(packed_mask(seen, window, slice(start, stop), slice(stop)))
    return seen[:, start:stop, :stop]


def _scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """Scores of a chunk: query [R, K, G, s, hd], key [R, K, t, hd] -> [R, K, G, s, t] float32."""
    scores = jax.lax.dot_general(_merge(query), key, _NT, preferred_element_type=jnp.float32)
    return scores.reshape(*query.shape[:4], -1)


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seen: Rows | jax.Array,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, _Residuals]:
    grouped = _group(query * scale, key.shape[2])
    keys, values = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    outs, normalisers = [], []
    for start, stop in _chunks(query.shape[1]):
        scores = _scores(grouped[:, :, :, start:stop], keys[:, :, :stop])
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = scores + _bias(seen, start, stop, window)[:, None, None]
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        weighted = jax.lax.dot_general(_merge(weights.astype(value.dtype)), values[:, :, :stop], _NN)
        outs.append((weighted.reshape(*total.shape[:4], -1) / total).astype(query.dtype))
        normalisers.append(top + jnp.log(total))
    out = _ungroup(jnp.concatenate(outs, axis=3))
    return out, _Residuals(query, key, value, seen, out, jnp.concatenate(normalisers, axis=3))


def _backward(
    scale: float, window: int | None, soft_cap: float | None, saved: _Residuals, grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    kv_heads = saved.key.shape[2]
    grouped, grads = _group(saved.query * scale, kv_heads), _group(grad, kv_heads)
    keys, values = saved.key.transpose(0, 2, 1, 3), saved.value.transpose(0, 2, 1, 3)
    # The softmax's Jacobian needs sum(weights * their gradients), which is sum(out * its gradient).
    inner = _group((grad * saved.out).astype(jnp.float32), kv_heads).sum(-1, keepdims=True)
    query_grads = []
    key_grad, value_grad = jnp.zeros_like(keys), jnp.zeros_like(values)
    for start, stop in _chunks(saved.query.shape[1]):
        chunk, chunk_grad = grouped[:, :, :, start:stop], _merge(grads[:, :, :, start:stop])
        scores = _scores(chunk, keys[:, :, :stop])
        slope = None
        if soft_cap is not None:
            bent = jnp.tanh(scores / soft_cap)
            scores, slope = soft_cap * bent, 1 - bent * bent
        scores = scores + _bias(saved.seen, start, stop, window)[:, None, None]
        weights = jnp.exp(scores - saved.log_normaliser[:, :, :, start:stop])
        weight_grads = jax.lax.dot_general(chunk_grad, values[:, :, :stop], _NT, preferred_element_type=jnp.float32)
        score_grads = weights * (weight_grads.reshape(weights.shape) - inner[:, :, :, start:stop])
        if slope is not None:
            score_grads = score_grads * slope
        weights, score_grads = (_merge(x.astype(grad.dtype)) for x in (weights, score_grads))
        query_grad = jax.lax.dot_general(score_grads, keys[:, :, :stop], _NN)
        query_grads.append(query_grad.reshape(chunk.shape))
        key_grad = key_grad.at[:, :, :stop].add(jax.lax.dot_general(score_grads, _merge(chunk), _TN))
        value_grad = value_grad.at[:, :, :stop].add(jax.lax.dot_general(weights, chunk_grad, _TN))
    query_grad = _ungroup(jnp.concatenate(query_grads, axis=3)) * scale
    return query_grad, key_grad.transpose(0, 2, 1, 3), value_grad.transpose(0, 2, 1, 3), None


causal_attention.defvjp(_forward, _backward)
