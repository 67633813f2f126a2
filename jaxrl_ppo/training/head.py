"""From hidden states to log-probs and entropy, chunk by chunk: [tokens, vocabulary] is never held, forward or back."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from jaxrl_ppo.models.layers import softcap


def gather_sources(hidden: jax.Array, source: jax.Array) -> jax.Array:
    """The hidden states that predict something: hidden [G * K, S, D], source int [G, T] in 0..K*S-1 -> [G, T, D]."""
    flat = hidden.reshape(source.shape[0], -1, hidden.shape[-1])
    return jnp.take_along_axis(flat, source[..., None], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def token_log_probs(
    hidden: jax.Array,
    kernel: jax.Array,
    target: jax.Array,
    temperature: jax.Array,
    chunk: int,
    with_entropy: bool,
    cap: float | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Log-prob of each target token and, when asked, the entropy of its distribution, both float32 [G, T].

    hidden [G, T, D] and kernel [D, V] are multiplied in their dtype, accumulated in float32; logits are bounded by
    `softcap` to `cap`, if the model has one, and divided by `temperature` (a scalar), in float32. At most `chunk`
    tokens of each of the G pieces are projected at a time, here and again in the backward pass, which keeps one float
    per token from the forward pass. G is the axis that rows are sharded over; the vocabulary may be sharded too (its
    reductions then run across devices).
    """
    return _forward(hidden, kernel, target, temperature, chunk, with_entropy, cap)[0]


def _forward(hidden, kernel, target, temperature, chunk, with_entropy, cap):
    def one_chunk(_, inputs):
        hidden, target = inputs
        logits = softcap(_matmul("gtd,dv->gtv", hidden, kernel), cap) / temperature
        log_sum = jax.nn.logsumexp(logits, axis=-1)
        log_prob = jnp.sum(jnp.where(_is_target(target, logits), logits, 0), axis=-1) - log_sum
        entropy = None
        if with_entropy:
            log_probs = logits - log_sum[..., None]
            entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
        return None, (log_prob, log_sum, entropy)

    slots = target.shape[1]
    _, outputs = jax.lax.scan(one_chunk, None, _split((hidden, target), chunk))
    log_prob, log_sum, entropy = _join(outputs, slots)
    return (log_prob, entropy), (hidden, kernel, target, temperature, log_sum, entropy)


def _backward(chunk, with_entropy, cap, residuals, cotangents):
    hidden, kernel, target, temperature, log_sum, entropy = residuals
    log_prob_bar, entropy_bar = cotangents

    def one_chunk(kernel_bar, inputs):
        hidden, target, log_sum, log_prob_bar, entropy, entropy_bar = inputs
        capped = softcap(_matmul("gtd,dv->gtv", hidden, kernel), cap)
        logits = capped / temperature
        log_probs = logits - log_sum[..., None]
        probs = jnp.exp(log_probs)
        # d log p(target) / d logits = onehot - p; d entropy / d logits = -p (log p + entropy).
        logits_bar = log_prob_bar[..., None] * (_is_target(target, logits) - probs)
        if with_entropy:
            logits_bar -= entropy_bar[..., None] * probs * (log_probs + entropy[..., None])
        logits_bar /= temperature
        if cap is not None:
            logits_bar *= 1 - jnp.square(capped / cap)
        logits_bar = logits_bar.astype(kernel.dtype)
        hidden_bar = _matmul("gtv,dv->gtd", logits_bar, kernel)
        # One accumulator per piece: the sum over pieces, and so the traffic between devices, comes once at the end.
        kernel_bar += _matmul("gtd,gtv->gdv", hidden, logits_bar)
        return kernel_bar, hidden_bar.astype(hidden.dtype)

    pieces, slots, _ = hidden.shape
    zeros = jnp.zeros((pieces, *kernel.shape), jnp.float32)
    inputs = (hidden, target, log_sum, log_prob_bar, entropy, entropy_bar)
    kernel_bar, hidden_bar = jax.lax.scan(one_chunk, zeros, _split(inputs, chunk))
    return _join(hidden_bar, slots), kernel_bar.sum(0).astype(kernel.dtype), None, None


token_log_probs.defvjp(_forward, _backward)


def _matmul(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _is_target(target: jax.Array, logits: jax.Array) -> jax.Array:
    # A comparison, not a gather: it stays local when the vocabulary is sharded.
    return target[..., None] == jnp.arange(logits.shape[-1])


def _split(tree, chunk: int):
    """Arrays [G, T, ...] -> [chunks, G, tokens a chunk, ...], equal chunks, the last padded with zeros."""

    def split(x):
        pieces, slots = x.shape[:2]
        chunks = math.ceil(slots / chunk)
        size = math.ceil(slots / chunks)
        x = jnp.pad(x, [(0, 0), (0, chunks * size - slots)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(pieces, chunks, size, *x.shape[2:]), 1, 0)

    return jax.tree.map(split, tree)


def _join(tree, slots: int):
    """The inverse of `_split`: [chunks, G, tokens, ...] -> [G, slots, ...]."""

    def join(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :slots]

    return jax.tree.map(join, tree)
