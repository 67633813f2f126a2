"""What an advantage estimator is given: a step's samples, one per row."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxrl_ppo.algorithms.masked import Array, masked_sum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """B samples of at most T response tokens. Entries outside the mask mean nothing and may be anything.

    A field that the caller does not have is None; an estimator's registration says which of them it needs.
    """

    token_rewards: Array  # [B, T] a sample's score sits on its last token of the mask; less KL, where configured
    mask: Array  # [B, T] 1 on tokens that the policy sampled
    group: Array  # [B] int: samples of one prompt share a number
    values: Array | None = None  # [B, T] the critic's, before each token
    greedy_scores: Array | None = None  # [B] score of the greedy response to the sample's prompt (ReMax)
    reward_parts: Array | None = None  # [B, K] the rewards that the score is made of (GDPO)
    reward_weights: Array | None = None  # [K] their weights
    old_log_probs: Array | None = None  # [B, T]
    sum_pi_squared: Array | None = None  # [B, T] sum over the vocabulary of the squared probabilities

    @property
    def scores(self) -> jax.Array:
        """Each sample's sum of token rewards, [B]."""
        return masked_sum(self.token_rewards, self.mask, axis=-1)

    def spread(self, per_sample: jax.Array) -> jax.Array:
        """`per_sample` [B] at every token of the mask, [B, T]; 0 elsewhere."""
        return per_sample[:, None] * (self.mask > 0)


def require_two_tokens(inputs: AdvantageInputs) -> None:
    """Raise ValueError unless the mask has two tokens: one has no variance to whiten with."""
    count = int(np.sum(np.asarray(inputs.mask) > 0))
    if count < 2:
        raise ValueError(f"advantages are whitened over the step's response tokens, but there are only {count}")
