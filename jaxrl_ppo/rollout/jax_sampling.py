"""Drawing tokens on the device: temperature, top-k, top-p, a key per request and token, exact log-probs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = Any  # of numpy on the host, of JAX in a program

BLOCK = 128  # the vocabulary is summed by blocks; a token is found by its block first


class Draw(NamedTuple):
    """How each row draws; arrays [B]. `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 do not truncate."""

    seeds: Array  # uint32 [B, 2], the two halves of a 64-bit seed
    temperature: Array
    top_k: Array
    top_p: Array


def sample(logits: jax.Array, draw: Draw, index: jax.Array, *, truncate: bool) -> tuple[jax.Array, jax.Array]:
    """One token per row of float32 logits [B, V]: tokens int32 [B] and their log-probs float32 [B].

    Randomness depends on a row's seed and its token `index` [B] alone. Log-probs are after temperature and truncation;
    of greedy rows, at temperature 1. Without `truncate`, top-k and top-p are not looked at.
    """
    greedy = draw.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, jnp.maximum(draw.temperature, 1e-8))[:, None]
    kept = jnp.where(greedy[:, None], scaled, _truncated(scaled, draw)) if truncate else scaled
    rows, vocabulary = kept.shape
    blocks = jnp.pad(kept, ((0, 0), (0, -vocabulary % BLOCK)), constant_values=-jnp.inf).reshape(rows, -1, BLOCK)
    tops = blocks.max(-1)
    top = tops.max(-1)
    weights = jnp.exp(blocks - top[:, None, None])
    drawn, total = _draw(weights, _uniforms(draw.seeds, index))
    best = jnp.argmax(tops, -1)
    likeliest = best * BLOCK + jnp.argmax(_block(blocks, best), -1)
    tokens = jnp.where(greedy, likeliest, drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], 1)[:, 0]
    return tokens, chosen - top - jnp.log(total)


def _block(blocks: jax.Array, index: jax.Array) -> jax.Array:
    """Block `index` [B] of each row of [B, n, BLOCK]."""
    return jnp.take_along_axis(blocks, index[:, None, None], 1)[:, 0]


def _uniforms(seeds: jax.Array, index: jax.Array) -> jax.Array:
    def one(seed: jax.Array, index: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), index))

    return jax.vmap(one)(seeds, index)


def _draw(weights: jax.Array, uniforms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens [B] with probability proportional to `weights` [B, n, BLOCK], and each row's sum [B].

    By inverting the cumulative sum: one pass over the vocabulary and one random number a row, where perturbing the
    logits would need one for every token.
    """
    sums = weights.sum(-1)
    cumulative = jnp.cumsum(sums, axis=1)
    total = cumulative[:, -1]
    target = uniforms * total
    # The first block whose cumulative sum exceeds the target has weight; so does the token found in it.
    block = jnp.minimum((cumulative <= target[:, None]).sum(1), sums.shape[1] - 1)
    inside = jnp.cumsum(_block(weights, block), axis=1)
    before, mass = (jnp.take_along_axis(x, block[:, None], 1)[:, 0] for x in (cumulative - sums, sums))
    # Summed in another order the block's mass may differ in its last bit: its share is taken of the inner sum.
    share = jnp.clip((target - before) / mass, 0.0, 1 - 2**-20)
    token = (inside <= (share * inside[:, -1])[:, None]).sum(1)
    return block * BLOCK + token, total


def _truncated(scaled: jax.Array, draw: Draw) -> jax.Array:
    """Scores outside the k likeliest, or outside the likeliest that make up top_p of what top-k left, become -inf."""
    descending = -jnp.sort(-scaled, axis=-1)
    vocabulary = scaled.shape[-1]
    size = jnp.where(draw.top_k > 0, jnp.minimum(draw.top_k, vocabulary), vocabulary)[:, None]
    inside_k = jnp.arange(vocabulary)[None] < size
    probabilities = jax.nn.softmax(jnp.where(inside_k, descending, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The likeliest always stays; with top_p 1 nothing may be lost to rounding.
    inside_p = (before < draw.top_p[:, None]) | (draw.top_p >= 1)[:, None]
    count = (inside_k & inside_p).sum(-1, keepdims=True)
    threshold = jnp.take_along_axis(descending, count - 1, 1)
    return jnp.where(scaled >= threshold, scaled, -jnp.inf)
