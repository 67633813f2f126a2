"""What a policy loss is given, in whatever layout the caller has: one sample per row, or several packed into a row."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_ppo.algorithms.masked import SequenceSum, padded_sequence_sum, zero_outside

# exp(20) is the largest probability ratio any loss works with.
MAX_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLossInputs:
    """Arrays of one shape [..., T], one entry per token. All become float32, and 0 outside the mask, when this is made.

    So a loss may compute with every entry: what stands outside the mask reaches neither its value nor its gradient.
    `sequence_sum(x)` gives, at each token, the sum of x over that token's sample; it must be told of the layout
    (`padded_sequence_sum`, the default, or `packed_sequence_sum`). A field that the caller does not have is None.
    """

    log_probs: jax.Array  # of the policy being trained; the only field that carries a gradient
    old_log_probs: jax.Array
    advantages: jax.Array
    mask: jax.Array
    importance_weights: jax.Array | None = None  # of rollout correction; compute_policy_loss applies them
    rollout_log_probs: jax.Array | None = None
    entropy: jax.Array | None = None
    selected: jax.Array | None = None  # what the loss's `select` chose, 1 or 0
    sequence_sum: SequenceSum = padded_sequence_sum

    def __post_init__(self) -> None:
        mask = self.mask
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "sequence_sum" and value is not None:
                value = zero_outside(value, mask)
                if field.name not in ("log_probs", "entropy"):
                    value = jax.lax.stop_gradient(value)
                object.__setattr__(self, field.name, value)

    @property
    def log_ratio(self) -> jax.Array:
        """log_probs - old_log_probs [..., T], clipped to what exp can take."""
        return jnp.clip(self.log_probs - self.old_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_mean(self, x: jax.Array) -> jax.Array:
        """At each token [..., T], the mean of x over the mask of that token's sample."""
        return self.sequence_sum(x * self.mask) / jnp.maximum(self.sequence_sum(self.mask), 1.0)
