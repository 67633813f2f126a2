"""The decoder's forward pass with a key-value cache: prompts once, then one token at a time for many requests.

A request's keys and values lie in two places: its prompt's in `prompt` [P, K, Tp, hd], shared by all requests with that
prompt, and those of its own tokens in `own` [B, K, W, hd], a ring. All requests write the same column of the ring at a
step, so that a write is one contiguous update; which of its columns a request may see follows from their positions.
Attending to a shared prompt is one matrix product for all its requests (Juravsky et al. 2024, arXiv:2402.05099).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.attention import Rows, causal_attention, mask_bias, packed_mask
from jaxrl_ppo.models.layers import Params, decoder_layer, rms_norm
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
    bias = mask_bias(packed_mask(Rows(positions, (positions < lengths[:, None]).astype(jnp.int32))))
    cos, sin = rope_angles(positions, config.rope, config.head_dim)
    kept: list[tuple[jax.Array, jax.Array]] = []

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        kept.append((key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)))
        return causal_attention(query, key, value, bias, config.query_scale)

    x = params["embed"]["embedding"].astype(dtype)[tokens]
    for layer in params["layers"]:
        x = decoder_layer(x, layer, config, cos, sin, attention)
    return rms_norm(x, params["final_norm"], config.norm_eps), kept


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
    own_bias = mask_bias(own_positions <= positions[:, None])
    prompt_columns = jnp.arange(cache[0].prompt_keys.shape[2])
    prompt_bias = mask_bias(prompt_columns < sharing.prompt_lengths[:, None])
    cos, sin = rope_angles(positions[:, None], config.rope, config.head_dim)
    written: list[LayerCache] = []

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        old = cache[len(written)]
        new = old._replace(
            own_keys=jax.lax.dynamic_update_slice(old.own_keys, key.transpose(0, 2, 1, 3), (0, 0, column, 0)),
            own_values=jax.lax.dynamic_update_slice(old.own_values, value.transpose(0, 2, 1, 3), (0, 0, column, 0)),
        )
        written.append(new)
        return _attend(query[:, 0] * config.query_scale, new, prompt_bias, own_bias, sharing)[:, None]

    x = params["embed"]["embedding"].astype(dtype)[tokens][:, None]
    for layer in params["layers"]:
        x = decoder_layer(x, layer, config, cos, sin, attention)
    return rms_norm(x, params["final_norm"], config.norm_eps)[:, 0], own_positions, written


class _Partial(NamedTuple):
    """Attention to a part of the keys, to be combined: the scores' maximum, the sum of exp, the weighted values."""

    top: jax.Array  # [B, K, G, 1]
    total: jax.Array  # [B, K, G, 1]
    weighted: jax.Array  # [B, K, G, hd]


def _attend(
    query: jax.Array, cache: LayerCache, prompt_bias: jax.Array, own_bias: jax.Array, sharing: Sharing
) -> jax.Array:
    """Attention of scaled queries [B, H, hd] to their prompts and their own tokens -> [B, H, hd]."""
    batch, heads, head_dim = query.shape
    prompts, members = sharing.members.shape
    kv_heads = cache.own_keys.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    own = _partial(grouped, cache.own_keys, cache.own_values, own_bias)

    def gather(x: jax.Array) -> jax.Array:  # [B, K, G, d] -> [P, K, n * G, d]
        rows = x[sharing.members.reshape(-1)].reshape(prompts, members, *x.shape[1:])
        return rows.transpose(0, 2, 1, 3, 4).reshape(prompts, kv_heads, -1, x.shape[-1])

    def scatter(x: jax.Array) -> jax.Array:  # the other way round
        rows = x.reshape(prompts, kv_heads, members, -1, x.shape[-1]).transpose(0, 2, 1, 3, 4)
        return rows.reshape(prompts * members, kv_heads, -1, x.shape[-1])[sharing.home]

    shared = _partial(gather(grouped), cache.prompt_keys, cache.prompt_values, prompt_bias)
    prompt = _Partial(*(scatter(x) for x in shared))
    top = jnp.maximum(prompt.top, own.top)
    prompt_share, own_share = jnp.exp(prompt.top - top), jnp.exp(own.top - top)
    total = prompt.total * prompt_share + own.total * own_share
    out = (prompt.weighted * prompt_share + own.weighted * own_share) / total
    return out.astype(query.dtype).reshape(batch, heads, head_dim)


def _partial(query: jax.Array, keys: jax.Array, values: jax.Array, bias: jax.Array) -> _Partial:
    """query [N, K, m, hd], keys and values [N, K, t, hd], bias [N, t]."""
    batch = ((0, 1), (0, 1))
    scores = jax.lax.dot_general(query, keys, (((3,), (3,)), batch), preferred_element_type=jnp.float32)
    scores = scores + bias[:, None, None]
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    weighted = jax.lax.dot_general(
        weights.astype(values.dtype), values, (((3,), (2,)), batch), preferred_element_type=jnp.float32
    )
    return _Partial(top, weights.sum(-1, keepdims=True), weighted)
