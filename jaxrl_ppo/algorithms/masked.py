"""Masked sums, means, variance and whitening that let nothing through from outside the mask, plus sums per sample."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
SequenceSum = Callable[[jax.Array], jax.Array]


def zero_outside(x: Array, mask: Array) -> jax.Array:
    """x [...] as float32, 0 where mask [...] is 0; NaN and infinity there touch neither value nor gradient."""
    return jnp.where(mask > 0, x, 0).astype(jnp.float32)


def masked_sum(x: Array, mask: Array, axis: int | None = None) -> jax.Array:
    """Sum of x [...] over mask [...]."""
    return jnp.sum(zero_outside(x, mask), axis=axis)


def masked_mean(x: Array, mask: Array, axis: int | None = None) -> jax.Array:
    """Mean of x [...] over mask [...]; 0 when the mask is empty."""
    return masked_sum(x, mask, axis) / (jnp.sum(mask > 0, axis=axis) + 1e-8)


def masked_variance(x: Array, mask: Array) -> jax.Array:
    """Unbiased variance of x [...] over mask [...].

    Raises ValueError for fewer than two tokens when called on concrete arrays. A traced function cannot raise; there
    the result is NaN, and `advantage_function` checks the count before the call.
    """
    count = jnp.sum(mask > 0)
    if not isinstance(count, jax.core.Tracer) and count < 2:
        raise ValueError(f"a variance needs at least two tokens in the mask, not {int(count)}")
    deviation = zero_outside(x, mask) - masked_mean(x, mask)
    return masked_mean(jnp.square(deviation), mask) * count / (count - 1)


def whiten(x: Array, mask: Array) -> jax.Array:
    """x [...] shifted and scaled to mean 0 and variance 1 over mask [...]; 0 outside it. Raises as masked_variance."""
    # Measured from the smallest value, a constant x is exactly 0 and stays so; its rounding error would be scaled up.
    smallest = jnp.min(jnp.where(mask > 0, x, jnp.inf))
    shifted = zero_outside(x - smallest, mask)
    variance = masked_variance(shifted, mask)
    return zero_outside((shifted - masked_mean(shifted, mask)) * jax.lax.rsqrt(variance + 1e-8), mask)


def padded_sequence_sum(x: jax.Array) -> jax.Array:
    """For one sample per row, x [B, T]: the sum over each row, at every token of it. Shape [B, T]."""
    return jnp.broadcast_to(jnp.sum(x, axis=-1, keepdims=True), x.shape)


def packed_sequence_sum(sample_ids: jax.Array, samples_per_row: int) -> SequenceSum:
    """For samples packed into rows: a function from x [R, S] to the sum over each token's sample, [R, S].

    `sample_ids` [R, S] int numbers the samples of a row from 0 to samples_per_row - 1; a sample never spans two rows.
    Tokens outside the mask may carry any of these ids: callers zero them first.
    """

    def row_sum(x: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, ids, num_segments=samples_per_row)[ids]

    return lambda x: jax.vmap(row_sum)(x, sample_ids)
