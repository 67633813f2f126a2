"""Losses whose gradient is that of the log-prob times a constant: CISPO, GPG, and DRO with its quadratic penalty."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_ppo.algorithms.policy_losses.inputs import PolicyLossInputs
from jaxrl_ppo.algorithms.registry import policy_loss
from jaxrl_ppo.algorithms.settings import PolicyLossSettings


@policy_loss("cispo")
def cispo(inputs: PolicyLossInputs, config: PolicyLossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of each token, [..., T], and its metrics: the clipped ratio is a weight, so that every token has a gradient.

    CISPO, MiniMax 2025, arXiv 2506.13585.
    """
    ratio = jnp.exp(inputs.log_ratio)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high))
    return -weight * inputs.advantages * inputs.log_probs, {"pg_clipfrac": ratio != weight, "ppo_kl": -inputs.log_ratio}


@policy_loss("gpg")
def gpg(inputs: PolicyLossInputs, config: PolicyLossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of each token, [..., T], and its metrics: the plain policy gradient.

    GPG, Chu et al. 2025, arXiv 2504.02546.
    """
    return -inputs.advantages * inputs.log_probs, {"ppo_kl": -inputs.log_ratio}


@policy_loss("dro")
def dro(inputs: PolicyLossInputs, config: PolicyLossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of each token, [..., T], and its metrics: the policy gradient with a quadratic penalty on the log-ratio.

    DRO, Richemond et al. 2024, arXiv 2405.19107. Raises ValueError when dro_beta is not set.
    """
    beta = config.policy_loss.dro_beta
    if beta is None:
        raise ValueError("policy loss dro needs actor_rollout_ref.actor.policy_loss.dro_beta, a number above 0")
    difference = inputs.log_probs - inputs.old_log_probs
    loss = -(inputs.log_probs * inputs.advantages - 0.5 * beta * jnp.square(difference))
    return loss, {"ppo_kl": -inputs.log_ratio}
