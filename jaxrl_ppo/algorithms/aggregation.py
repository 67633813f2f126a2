"""How token losses become one number: a weight per token, computed once for the whole global mini-batch.

The loss is sum(token_loss * weight). The weights are fixed before the mini-batch is cut into micro-batches, packed or
spread over devices, so neither the loss nor its gradient can depend on how that is done.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.algorithms.masked import SequenceSum, zero_outside

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def token_weights(
    mode: str,
    mask: np.ndarray,
    loss_scale_factor: float | None = None,
    response_mask: np.ndarray | None = None,
) -> np.ndarray:
    """Weight of every token of a global mini-batch. Shape [B, T], float32, 0 outside the mask.

    `mask` [B, T] is 1 where a token counts. `loss_scale_factor` is the divisor of seq-mean-token-sum-norm (Dr.GRPO,
    arXiv 2503.20783): a constant of the run, by default the configured response length. Where rollout correction
    rejected tokens, `response_mask` [B, T] is the mask before it: seq-mean-* divides by the number of sequences
    without those rejected whole (an empty response counts: it was sampled).

    Raises ValueError for an unknown mode, or for seq-mean-token-sum-norm without a factor.
    """
    counted = np.asarray(mask) > 0
    length = counted.sum(axis=-1, keepdims=True)
    rejected = 0 if response_mask is None else np.sum((np.asarray(response_mask) > 0).any(axis=-1) & ~counted.any(-1))
    sequences = max(len(counted) - int(rejected), 1)
    if mode == "token-mean":
        weight = 1.0 / max(int(counted.sum()), 1)
    elif mode == "token-sum":
        weight = 1.0
    elif mode == "seq-mean-token-sum":
        weight = 1.0 / sequences
    elif mode == "seq-mean-token-mean":
        weight = 1.0 / (np.maximum(length, 1) * sequences)
    elif mode == "seq-mean-token-sum-norm":
        if loss_scale_factor is None:
            raise ValueError("seq-mean-token-sum-norm needs loss_scale_factor, e.g. the configured response length")
        weight = 1.0 / (loss_scale_factor * sequences)
    else:
        raise ValueError(f"loss_agg_mode is {mode!r}, not one of {', '.join(LOSS_AGG_MODES)}")
    return np.where(counted, weight, 0.0).astype(np.float32)


def weighted_sum(token_values: jax.Array, weights: jax.Array) -> jax.Array:
    """sum(token_values * weights) as a float32 scalar; values where the weight is 0 are ignored, NaN included."""
    return jnp.sum(zero_outside(token_values, weights) * weights)


def reject_in_loss(
    mode: str, weights: jax.Array, mask: jax.Array, kept: jax.Array, sequence_sum: SequenceSum, sequences: int
) -> tuple[jax.Array, jax.Array]:
    """`weights` after a rejection that only the loss can decide (bypass mode), and the share of the divisor it removes.

    `weights`, `mask` and `kept` (1 on tokens that stay) have the caller's layout [..., T]; `sequences` is the number of
    sequences in the global mini-batch. What divides by a sequence's own length is adjusted here. The divisor of the
    whole mini-batch cannot be known inside a micro-batch: the caller adds up the shares of all micro-batches and, at
    the end, divides loss and gradient by 1 - their sum. The result is token_weights' with the two masks.
    """
    kept = kept * mask
    length, kept_length = sequence_sum(mask), sequence_sum(kept)
    remaining = weights * kept
    if mode == "token-mean":
        return remaining, jnp.sum(weights * (1 - kept))
    if mode == "token-sum":
        return remaining, jnp.zeros(())
    if mode == "seq-mean-token-mean":
        remaining = remaining * length / jnp.maximum(kept_length, 1)
    rejected_whole = mask * (kept_length == 0) / jnp.maximum(length, 1)
    return remaining, jnp.sum(rejected_whole) / sequences
