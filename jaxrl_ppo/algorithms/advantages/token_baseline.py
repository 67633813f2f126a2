"""A baseline for each step, weighted by how uncertain the paths up to it were: the optimal token baseline."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_ppo.algorithms.advantages.inputs import AdvantageInputs
from jaxrl_ppo.algorithms.groups import group_sum
from jaxrl_ppo.algorithms.masked import Array, zero_outside
from jaxrl_ppo.algorithms.registry import advantage
from jaxrl_ppo.algorithms.settings import AdvantageSettings

NEEDS = ("old_log_probs", "sum_pi_squared")


def _returns_and_path_variance(inputs: AdvantageInputs) -> tuple[jax.Array, jax.Array]:
    """Return-to-go G and the path's variance so far W, both [B, T].

    A token adds 1 - 2 pi + sum(pi^2), the squared norm of its score function with respect to the logits.
    """
    assert inputs.old_log_probs is not None  # for the type checker: `needs` has seen to it
    assert inputs.sum_pi_squared is not None
    rewards = zero_outside(inputs.token_rewards, inputs.mask)
    returns = jnp.flip(jnp.cumsum(jnp.flip(rewards, -1), axis=-1), -1)
    probability = jnp.exp(zero_outside(inputs.old_log_probs, inputs.mask))
    added = zero_outside(1 - 2 * probability + zero_outside(inputs.sum_pi_squared, inputs.mask), inputs.mask)
    return returns, jnp.cumsum(added, axis=-1)


def _advantages(returns: jax.Array, variance: jax.Array, mask: jax.Array, group: Array) -> jax.Array:
    weight = zero_outside(variance, mask)
    baseline = group_sum(returns * weight, group) / (group_sum(weight, group) + 1e-8)
    return zero_outside(returns - baseline, mask)


@advantage("optimal_token_baseline", needs=NEEDS)
def optimal_token_baseline(inputs: AdvantageInputs, config: AdvantageSettings) -> tuple[jax.Array, jax.Array]:
    """Advantages and returns-to-go, [B, T]: at step t the baseline is sum(G W) / sum(W) over the group's samples there.

    The optimal token baseline, Li et al. 2026, arXiv 2602.07078. A sample alone at its step is its own baseline.
    """
    mask = jnp.asarray(inputs.mask)
    returns, variance = _returns_and_path_variance(inputs)
    return _advantages(returns, variance, mask, inputs.group), zero_outside(returns, mask)


@advantage("tir_optimal_token_baseline", needs=NEEDS)
def tir_optimal_token_baseline(inputs: AdvantageInputs, config: AdvantageSettings) -> tuple[jax.Array, jax.Array]:
    """As optimal_token_baseline, for tool-integrated reasoning: step t is the t-th token that the policy sampled.

    Tool output between turns differs in length from sample to sample; it is left out before steps are compared.
    """
    mask = jnp.asarray(inputs.mask)
    returns, variance = _returns_and_path_variance(inputs)
    sampled_first = jnp.argsort(mask <= 0, axis=-1, stable=True)
    returns_there, variance_there, mask_there = (
        jnp.take_along_axis(x, sampled_first, axis=-1) for x in (returns, variance, mask)
    )
    advantages = _advantages(returns_there, variance_there, mask_there, inputs.group)
    in_place = jnp.argsort(sampled_first, axis=-1)
    return jnp.take_along_axis(advantages, in_place, axis=-1), zero_outside(returns, mask)
