"""DPPO: in place of ratio clipping, a trust region on how far a token's probability has moved from the rollout's."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_ppo.algorithms.policy_losses.inputs import MAX_LOG_RATIO, PolicyLossInputs
from jaxrl_ppo.algorithms.registry import policy_loss
from jaxrl_ppo.algorithms.settings import PolicyLossSettings


@policy_loss("dppo_tv", needs=("rollout_log_probs",))
def dppo_tv(inputs: PolicyLossInputs, config: PolicyLossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of each token, [..., T], and its metrics: masked where the probability has moved too far.

    DPPO with the binary total variation, Qi et al. 2026, arXiv 2602.04879. A token is masked when its probability has
    left that of the rollout policy in the direction of its advantage, by more than clip_ratio_high upwards or
    clip_ratio_low downwards. clip_ratio_c bounds the importance ratio, which is to the rollout policy too.
    """
    moved = jnp.exp(inputs.log_probs) - jnp.exp(_rollout(inputs))
    inside = jnp.where(inputs.advantages > 0, moved <= config.clip_ratio_high, moved >= -config.clip_ratio_low)
    return _masked_policy_gradient(inputs, inside, config)


@policy_loss("dppo_kl", needs=("rollout_log_probs",))
def dppo_kl(inputs: PolicyLossInputs, config: PolicyLossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
    """As dppo_tv, with KL(rollout || policy) of the token against all others in place of the difference.

    DPPO with the binary KL, Qi et al. 2026, arXiv 2602.04879.
    """
    log_rollout = _rollout(inputs)
    rollout, policy = jnp.exp(log_rollout), jnp.exp(inputs.log_probs)
    others = (1 - rollout) * jnp.log((1 - rollout + 1e-8) / (1 - policy + 1e-8))
    divergence = rollout * (log_rollout - inputs.log_probs) + others
    inside = jnp.where(
        inputs.advantages > 0,
        (divergence <= config.clip_ratio_high) | (policy <= rollout),
        (divergence <= config.clip_ratio_low) | (policy >= rollout),
    )
    return _masked_policy_gradient(inputs, inside, config)


def _rollout(inputs: PolicyLossInputs) -> jax.Array:
    assert inputs.rollout_log_probs is not None  # for the type checker: `needs` has seen to it
    return inputs.rollout_log_probs


def _masked_policy_gradient(
    inputs: PolicyLossInputs, inside: jax.Array, config: PolicyLossSettings
) -> tuple[jax.Array, dict[str, jax.Array]]:
    log_ratio = jnp.clip(inputs.log_probs - _rollout(inputs), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    weight = jax.lax.stop_gradient(jnp.minimum(ratio, config.clip_ratio_c) * inside)
    metrics = {
        "pg_clipfrac": ~inside,
        "pg_clipfrac_lower": inside & (ratio > config.clip_ratio_c),
        "ppo_kl": -log_ratio,
    }
    return -inputs.advantages * weight * inputs.log_probs, metrics
