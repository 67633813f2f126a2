"""Losses that weigh a sequence as a whole: GSPO, SAPO, GMPO. All are averaged per sequence, whatever is configured."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_ppo.algorithms.policy_losses.inputs import PolicyLossInputs
from jaxrl_ppo.algorithms.registry import policy_loss
from jaxrl_ppo.algorithms.settings import PolicyLossSettings


@policy_loss("gspo", aggregation="seq-mean-token-mean")
def gspo(inputs: PolicyLossInputs, config: PolicyLossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of each token, [..., T], and its metrics: one ratio for a sequence, its tokens' geometric mean, clipped.

    GSPO, Zheng et al. 2025, arXiv 2507.18071, in its token form: the ratio has the sequence's value, and each token's
    own gradient.
    """
    log_ratio = inputs.log_probs - inputs.old_log_probs
    sequence = jax.lax.stop_gradient(inputs.sequence_mean(log_ratio))
    own_gradient = inputs.log_probs - jax.lax.stop_gradient(inputs.log_probs)
    ratio = jnp.exp(jnp.minimum(own_gradient + sequence, 10.0))
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * jnp.clip(ratio, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    metrics = {"pg_clipfrac": clipped > plain, "ppo_kl": -log_ratio}
    return jnp.maximum(plain, clipped), metrics


@policy_loss("sapo", aggregation="seq-mean-token-mean")
def sapo(inputs: PolicyLossInputs, config: PolicyLossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of each token, [..., T], and its metrics: a smooth gate on the ratio in place of clipping.

    SAPO, Gao et al. 2025, arXiv 2511.20347.
    """
    tau = jnp.where(inputs.advantages > 0, config.tau_pos, config.tau_neg)
    gate = jax.nn.sigmoid(tau * (jnp.exp(inputs.log_ratio) - 1)) * 4 / tau
    return -gate * inputs.advantages, {"ppo_kl": -inputs.log_ratio}


@policy_loss("geo_mean", aggregation="seq-mean-token-mean")
def geo_mean(inputs: PolicyLossInputs, config: PolicyLossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of each token, [..., T], and its metrics: the geometric mean of a sequence's ratios, each clipped first.

    GMPO, Zhao et al. 2025, arXiv 2507.20673. Clipping is in log space (clip_ratio_low and _high bound the log-ratio)
    and on the side that would raise the objective. Every token of a sequence carries the sequence's loss.
    """
    advantages, log_ratio = inputs.advantages, inputs.log_ratio
    bounded = jnp.where(
        advantages > 0,
        jnp.minimum(log_ratio, config.clip_ratio_high),
        jnp.maximum(log_ratio, -config.clip_ratio_low),
    )
    bounded = jnp.where(advantages == 0, 0.0, bounded)
    ratio = jnp.exp(inputs.sequence_mean(bounded))
    outside = (log_ratio > config.clip_ratio_high) | (log_ratio < -config.clip_ratio_low)
    metrics = {
        "pg_clipfrac": outside & (advantages > 0),
        "pg_clipfrac_lower": outside & (advantages < 0),
        "ppo_kl": -log_ratio,
    }
    return -inputs.sequence_mean(advantages) * ratio, metrics
