"""KL divergence to the reference policy: estimators, the penalty in the reward, and the controller of its weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.algorithms.masked import masked_mean, zero_outside
from jaxrl_ppo.algorithms.settings import KlControlSettings


def kl_penalty(log_probs: jax.Array, ref_log_probs: jax.Array, mask: jax.Array, kind: str) -> jax.Array:
    """Estimate of KL(policy || reference) at each token, [..., T]; 0 outside the mask.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). `kind`: `kl` or `k1`, `abs`, `mse`
    or `k2`, `low_var_kl` or `k3`; with a `+` suffix the value is kept and the gradient is k2's, which is that of the
    KL itself in expectation. Raises ValueError for another kind.
    """
    difference = zero_outside(log_probs, mask) - jax.lax.stop_gradient(zero_outside(ref_log_probs, mask))
    value = _estimate(difference, kind.removesuffix("+"))
    if kind.endswith("+"):
        squared = _estimate(difference, "k2")
        value = squared - jax.lax.stop_gradient(squared) + jax.lax.stop_gradient(value)
    return value


def _estimate(difference: jax.Array, kind: str) -> jax.Array:
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return jnp.abs(difference)
    if kind in ("mse", "k2"):
        return 0.5 * jnp.square(difference)
    if kind in ("low_var_kl", "k3"):
        negative = jnp.clip(-difference, -20, 20)
        return jnp.clip(jnp.exp(negative) - negative - 1, -10, 10)
    raise ValueError(f"the KL estimator is {kind!r}, not one of kl, k1, abs, mse, k2, low_var_kl, k3 (each with +)")


def penalise_rewards(
    token_scores: np.ndarray,
    log_probs: np.ndarray,
    ref_log_probs: np.ndarray,
    mask: np.ndarray,
    coefficient: float,
    kind: str,
) -> tuple[np.ndarray, float]:
    """KL in the reward: token rewards [B, T] = scores - coefficient * KL, and the batch's mean KL for the controller.

    All arrays are [B, T]; `log_probs` are those of the policy that is about to be trained (its old log-probs). The mean
    is over samples, of each sample's mean over its tokens. Ziegler et al. 2019, arXiv 1909.08593.
    """
    penalty = kl_penalty(jnp.asarray(log_probs), jnp.asarray(ref_log_probs), jnp.asarray(mask), kind)
    rewards = zero_outside(jnp.asarray(token_scores), jnp.asarray(mask)) - coefficient * penalty
    return np.asarray(rewards), float(jnp.mean(masked_mean(penalty, jnp.asarray(mask), axis=-1)))


class KlController:
    """The weight of the KL penalty in the reward: constant, or steered towards a target KL.

    Ziegler et al. 2019, arXiv 1909.08593, section 2.2. `coefficient` is used for a step's rewards; then `update`.
    """

    def __init__(self, settings: KlControlSettings) -> None:
        """Start at kl_coef. Raises ValueError for a type other than fixed and adaptive."""
        if settings.type not in ("fixed", "adaptive"):
            raise ValueError(f"algorithm.kl_ctrl.type is {settings.type!r}, not fixed or adaptive")
        self.coefficient = float(settings.kl_coef)
        self._settings = settings

    def update(self, kl: float, samples: int) -> None:
        """Adapt to the mean KL of a step's `samples` samples, after that step's rewards have been penalised."""
        if self._settings.type == "adaptive":
            error = min(max(kl / self._settings.target_kl - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * samples / self._settings.horizon

    def state(self) -> dict[str, float]:
        """What a checkpoint holds."""
        return {"coefficient": self.coefficient}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's `state()`. A fixed weight stays what the configuration says."""
        if self._settings.type == "adaptive":
            self.coefficient = float(state["coefficient"])
