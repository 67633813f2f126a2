"""PPO's clipped loss with the dual clip."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_ppo.algorithms.policy_losses.inputs import PolicyLossInputs
from jaxrl_ppo.algorithms.registry import policy_loss
from jaxrl_ppo.algorithms.settings import PolicyLossSettings


@policy_loss("vanilla")
def vanilla(inputs: PolicyLossInputs, config: PolicyLossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of each token, [..., T], and its metrics.

    PPO, Schulman et al. 2017, arXiv 1707.06347; the dual clip, Ye et al. 2020, arXiv 1912.09729, bounds the loss of a
    token with a negative advantage by -A * clip_ratio_c, however much likelier the policy has made it.
    """
    advantages = inputs.advantages
    ratio = jnp.exp(inputs.log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss = jnp.maximum(plain, clipped)
    bound = -advantages * config.clip_ratio_c
    negative = advantages < 0
    metrics = {
        "pg_clipfrac": clipped > plain,
        "pg_clipfrac_lower": (loss > bound) & negative,
        "ppo_kl": -inputs.log_ratio,
    }
    return jnp.where(negative, jnp.minimum(loss, bound), loss), metrics
