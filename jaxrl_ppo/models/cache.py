"""The decoder's forward pass with a key-value cache: prompts once, then one token at a time for many requests.

A request's keys and values lie in two places: its prompt's in `prompt` [P, K, Tp, hd], shared by all requests with that
prompt, and those of its own tokens in `own` [B, K, W, hd], a ring. All requests write the same column of the ring at a
step, so that a write is one contiguous update; which of its columns a request may see follows from their positions.
Attending to a shared prompt is one matrix product for all its requests (Juravsky et al. 2024, arXiv:2402.05099).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_ppo.models.architecture import DecoderConfig, LayerKind
from jaxrl_ppo.models.attention import Rows, causal_attention, mask_bias, packed_mask
from jaxrl_ppo.models.layers import Params, decoder_layer, embed, rms_norm, softcap
from jaxrl_ppo.models.rope import rope_angles

EMPTY = jnp.iinfo(jnp.int32).max  # position of a column that nobody may see


class LayerCache(NamedTuple):
    """One layer's keys and values: of prompts [P, K, Tp, hd] and of generated tokens [B, K, W, hd]."""

    prompt_keys: jax.Array
    prompt_values: jax.Array
    own_keys: jax.Array
    own_values: jax.Array


class Sharing(NamedTuple):
    """Which requests share which row of prompts.

    `members` [P, n] are the requests of each row (any number where there are fewer), `home` [B] the index of each
    request in the flattened `members`, `prompt_lengths` [P].
    """

    members: Any  # arrays of numpy on the host, of JAX in a program
    home: Any
    prompt_lengths: Any


def prefill(
    tokens: jax.Array, lengths: jax.Array, params: Params, config: DecoderConfig, dtype: Any
) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Run whole sequences [P, S], right-padded, `lengths` [P].

    Returns hidden states [P, S, D] after the final norm and each layer's keys and values [P, K, S, hd].
    `params` are a decoder's, with `layers` a list of each layer's own.
    """
    positions = jnp.arange(tokens.shape[1])[None]
    rows = Rows(positions, (positions < lengths[:, None]).astype(jnp.int32))
    masks = {kind.window: mask_bias(packed_mask(rows, kind.window)) for kind in config.kinds}
    angles = {kind.rope: rope_angles(positions, kind.rope, config.head_dim) for kind in config.kinds}
    kept: list[tuple[jax.Array, jax.Array]] = []
    x = embed(tokens, params["embed"], config, dtype)
    for layer, kind in zip(params["layers"], itertools.cycle(config.kinds)):

        def attention(query: jax.Array, key: jax.Array, value: jax.Array, kind: LayerKind = kind) -> jax.Array:
            kept.append((key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)))
            seen, window = masks[kind.window], kind.window
            return causal_attention(query, key, value, seen, config.query_scale, window, config.attention_softcap)

        x, _ = decoder_layer(x, layer, config, *angles[kind.rope], attention)
    return rms_norm(x, params["final_norm"], config), kept


def decode(
    tokens: jax.Array,
    positions: jax.Array,
    column: jax.Array,
    own_positions: jax.Array,
    cache: Sequence[LayerCache],
    sharing: Sharing,
    params: Params,
    config: DecoderConfig,
    dtype: Any,
) -> tuple[jax.Array, jax.Array, list[LayerCache]]:
    """Run one token of each request: tokens and positions [B], written to ring column `column`.

    `own_positions` [B, W] are the positions of what the ring holds. Returns hidden states [B, D] after the final norm,
    and own_positions and cache with the token in them.
    """
    own_positions = jax.lax.dynamic_update_slice(own_positions, positions[:, None], (0, column))
    prompt_columns = cache[0].prompt_keys.shape[2]
    biases = {
        kind.window: _biases(positions, own_positions, prompt_columns, sharing, kind.window) for kind in config.kinds
    }
    angles = {kind.rope: rope_angles(positions[:, None], kind.rope, config.head_dim) for kind in config.kinds}
    written: list[LayerCache] = []
    x = embed(tokens, params["embed"], config, dtype)[:, None]
    for layer, old, kind in zip(params["layers"], cache, itertools.cycle(config.kinds)):

        def attention(
            query: jax.Array, key: jax.Array, value: jax.Array, old: LayerCache = old, kind: LayerKind = kind
        ) -> jax.Array:
            new = old._replace(
                own_keys=jax.lax.dynamic_update_slice(old.own_keys, key.transpose(0, 2, 1, 3), (0, 0, column, 0)),
                own_values=jax.lax.dynamic_update_slice(old.own_values, value.transpose(0, 2, 1, 3), (0, 0, column, 0)),
            )
            written.append(new)
            scaled = query[:, 0] * config.query_scale
            return _attend(scaled, new, *biases[kind.window], sharing, config.attention_softcap)[:, None]

        x, _ = decoder_layer(x, layer, config, *angles[kind.rope], attention)
    return rms_norm(x, params["final_norm"], config)[:, 0], own_positions, written


def _biases(
    positions: jax.Array, own_positions: jax.Array, prompt_columns: int, sharing: Sharing, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """What requests at `positions` [B] see of their prompts, [P, 1 or n, Tp], and of their own tokens, [B, 1, W]."""
    own = own_positions <= positions[:, None]
    prompt = (jnp.arange(prompt_columns) < sharing.prompt_lengths[:, None])[:, None]
    if window is not None:
        own &= own_positions > positions[:, None] - window
        prompt &= jnp.arange(prompt_columns) > positions[sharing.members][..., None] - window
    return mask_bias(prompt), mask_bias(own[:, None])


class _Partial(NamedTuple):
    """Attention to a part of the keys, to be combined: the scores' maximum, the sum of exp, the weighted values."""

    top: jax.Array  # [B, K, G, 1]
    total: jax.Array  # [B, K, G, 1]
    weighted: jax.Array  # [B, K, G, hd]


def _attend(
    query: jax.Array,
    cache: LayerCache,
    prompt_bias: jax.Array,
    own_bias: jax.Array,
    sharing: Sharing,
    cap: float | None,
) -> jax.Array:
    """Attention of scaled queries [B, H, hd] to their prompts and their own tokens -> [B, H, hd].

    A request that sees nothing of its prompt any more always sees itself, whose score outweighs the masked ones.
    """
    batch, heads, head_dim = query.shape
    prompts, members = sharing.members.shape
    kv_heads = cache.own_keys.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    own = _partial(grouped, cache.own_keys, cache.own_values, own_bias, cap)

    def gather(x: jax.Array) -> jax.Array:  # [B, K, G, d] -> [P, K, n * G, d]
        rows = x[sharing.members.reshape(-1)].reshape(prompts, members, *x.shape[1:])
        return rows.transpose(0, 2, 1, 3, 4).reshape(prompts, kv_heads, -1, x.shape[-1])

    def scatter(x: jax.Array) -> jax.Array:  # the other way round
        rows = x.reshape(prompts, kv_heads, members, -1, x.shape[-1]).transpose(0, 2, 1, 3, 4)
        return rows.reshape(prompts * members, kv_heads, -1, x.shape[-1])[sharing.home]

    if prompt_bias.shape[1] > 1:
        prompt_bias = jnp.repeat(prompt_bias, heads // kv_heads, axis=1)
    shared = _partial(gather(grouped), cache.prompt_keys, cache.prompt_values, prompt_bias, cap)
    prompt = _Partial(*(scatter(x) for x in shared))
    top = jnp.maximum(prompt.top, own.top)
    prompt_share, own_share = jnp.exp(prompt.top - top), jnp.exp(own.top - top)
    total = prompt.total * prompt_share + own.total * own_share
    out = (prompt.weighted * prompt_share + own.weighted * own_share) / total
    return out.astype(query.dtype).reshape(batch, heads, head_dim)


def _partial(query: jax.Array, keys: jax.Array, values: jax.Array, bias: jax.Array, cap: float | None) -> _Partial:
    """query [N, K, m, hd], keys and values [N, K, t, hd], bias [N, 1 or m, t]."""
    batch = ((0, 1), (0, 1))
    scores = jax.lax.dot_general(query, keys, (((3,), (3,)), batch), preferred_element_type=jnp.float32)
    scores = softcap(scores, cap) + bias[:, None]
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    weighted = jax.lax.dot_general(
        weights.astype(values.dtype), values, (((3,), (2,)), batch), preferred_element_type=jnp.float32
    )
    return _Partial(top, weights.sum(-1, keepdims=True), weighted)
