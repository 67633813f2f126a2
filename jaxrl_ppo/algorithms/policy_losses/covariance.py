"""Losses that single out tokens whose log-prob and advantage move together, where entropy is lost: Clip-Cov, KL-Cov.

Which tokens those are is decided on the host, from the old log-probs of the whole global mini-batch. Decided inside a
micro-batch it would depend on how the mini-batch is cut up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.algorithms.policy_losses.inputs import PolicyLossInputs
from jaxrl_ppo.algorithms.registry import policy_loss
from jaxrl_ppo.algorithms.settings import PolicyLossSettings


def _covariance(old_log_probs: np.ndarray, advantages: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Each counted token's part in the covariance of log-prob and advantage, flat, in order."""
    if not counted.any():
        return np.zeros(0)
    log_probs, advantage = old_log_probs[counted].astype(np.float64), advantages[counted].astype(np.float64)
    return (advantage - advantage.mean()) * (log_probs - log_probs.mean())


def _marked(counted: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    selected = np.zeros(counted.shape, bool)
    selected[tuple(axis[chosen] for axis in np.nonzero(counted))] = True
    return selected


def _share(ratio: float, tokens: int) -> int:
    return max(int(ratio * tokens), 1) if ratio > 0 and tokens > 0 else 0


def select_clip_cov(
    old_log_probs: np.ndarray, advantages: np.ndarray, mask: np.ndarray, config: PolicyLossSettings, seed: int
) -> np.ndarray:
    """Tokens whose gradient is cut, [B, T] bool: a random share, clip_cov_ratio of all, of those between the bounds.

    All arrays are [B, T], the whole global mini-batch. `seed` decides the choice.
    """
    counted = np.asarray(mask) > 0
    covariance = _covariance(old_log_probs, advantages, counted)
    options = config.policy_loss
    candidates = np.flatnonzero((covariance > options.clip_cov_lb) & (covariance < options.clip_cov_ub))
    count = min(_share(options.clip_cov_ratio, covariance.size), candidates.size)
    return _marked(counted, np.random.default_rng(seed).choice(candidates, count, replace=False))


def select_kl_cov(
    old_log_probs: np.ndarray, advantages: np.ndarray, mask: np.ndarray, config: PolicyLossSettings, seed: int
) -> np.ndarray:
    """Tokens that get the KL penalty, [B, T] bool: the share kl_cov_ratio with the greatest covariance.

    All arrays are [B, T], the whole global mini-batch. Nothing is random; `seed` is not used.
    """
    counted = np.asarray(mask) > 0
    covariance = _covariance(old_log_probs, advantages, counted)
    greatest = np.argsort(-covariance, kind="stable")
    return _marked(counted, greatest[: _share(config.policy_loss.kl_cov_ratio, covariance.size)])


@policy_loss("clip_cov", select=select_clip_cov)
def clip_cov(inputs: PolicyLossInputs, config: PolicyLossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of each token, [..., T], and its metrics: PPO's clipped loss without the selected tokens.

    Clip-Cov, Cui et al. 2025, arXiv 2505.22617.
    """
    assert inputs.selected is not None  # for the type checker: `select` has seen to it
    ratio = jnp.exp(inputs.log_ratio)
    clipped = jnp.clip(ratio, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss = jnp.maximum(-inputs.advantages * ratio, -inputs.advantages * clipped)
    return loss * (1 - inputs.selected), {"pg_clipfrac": inputs.selected, "ppo_kl": -inputs.log_ratio}


@policy_loss("kl_cov", select=select_kl_cov)
def kl_cov(inputs: PolicyLossInputs, config: PolicyLossSettings) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of each token, [..., T], and its metrics: the unclipped ratio, with a KL penalty on the selected tokens.

    KL-Cov, Cui et al. 2025, arXiv 2505.22617.
    """
    assert inputs.selected is not None  # for the type checker: `select` has seen to it
    penalty = config.policy_loss.ppo_kl_coef * jnp.abs(inputs.log_ratio) * inputs.selected
    loss = -inputs.advantages * jnp.exp(inputs.log_ratio) + penalty
    return loss, {"pg_clipfrac": inputs.selected, "ppo_kl": -inputs.log_ratio}
