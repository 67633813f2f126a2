"""The critic's loss, and how much of the returns it explains."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.algorithms.masked import zero_outside


def value_loss(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, mask: jax.Array, cliprange: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of each token [..., T], 0 outside the mask, and its metrics of the same shape; all arguments are [..., T].

    PPO's value clipping (described by Andrychowicz et al. 2020, arXiv 2006.05990): half the squared error, or that of
    the value held within `cliprange` of the old one where that is larger.
    """
    values, old_values, returns = (zero_outside(x, mask) for x in (values, old_values, returns))
    old_values, returns = jax.lax.stop_gradient((old_values, returns))
    plain = jnp.square(values - returns)
    clipped = jnp.square(jnp.clip(values, old_values - cliprange, old_values + cliprange) - returns)
    metrics = {"vf_clipfrac": clipped > plain, "vpred_mean": values}
    metrics = {name: jax.lax.stop_gradient(zero_outside(value, mask)) for name, value in metrics.items()}
    return zero_outside(0.5 * jnp.maximum(plain, clipped), mask), metrics


def explained_variance(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> float:
    """The share of the returns' variance that the values explain: 1 is all, 0 no more than a constant would.

    All arguments are [B, T]; 0 when the returns do not vary by more than float32's rounding.
    """
    counted = np.asarray(mask) > 0
    target, error = returns[counted].astype(np.float64), (returns - values)[counted].astype(np.float64)
    if not target.size:
        return 0.0
    spread = float(np.var(target))
    # Returns are sums with the values: they round as the larger of the two do.
    rounding = 1e-12 * float(np.mean(target**2 + values[counted].astype(np.float64) ** 2))
    return 1.0 - float(np.var(error)) / spread if spread > rounding else 0.0
