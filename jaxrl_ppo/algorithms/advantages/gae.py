"""Generalised advantage estimation with a critic."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_ppo.algorithms.advantages.inputs import AdvantageInputs, require_two_tokens
from jaxrl_ppo.algorithms.masked import whiten, zero_outside
from jaxrl_ppo.algorithms.registry import advantage
from jaxrl_ppo.algorithms.settings import AdvantageSettings


@advantage("gae", needs=("values",), check=require_two_tokens)
def gae(inputs: AdvantageInputs, config: AdvantageSettings) -> tuple[jax.Array, jax.Array]:
    """Whitened advantages and the returns the critic learns from, [B, T].

    GAE, Schulman et al. 2015, arXiv 1506.02438. Tokens outside the mask (tool output, padding) are stepped over: the
    next value and advantage are those of the next token that the policy sampled.
    """
    assert inputs.values is not None  # for the type checker: `needs` has seen to it
    mask = jnp.asarray(inputs.mask)
    rewards, values = zero_outside(inputs.token_rewards, mask), zero_outside(inputs.values, mask)

    def step(after: tuple[jax.Array, jax.Array], token: tuple[jax.Array, ...]) -> tuple[tuple, jax.Array]:
        next_value, next_advantage = after
        reward, value, counted = token
        delta = reward + config.gamma * next_value - value
        advantage = delta + config.gamma * config.lam * next_advantage
        here = jnp.where(counted > 0, value, next_value), jnp.where(counted > 0, advantage, next_advantage)
        return here, here[1]

    past_the_end = jnp.zeros(mask.shape[0]), jnp.zeros(mask.shape[0])
    advantages = jax.lax.scan(step, past_the_end, (rewards.T, values.T, mask.T), reverse=True)[1].T
    return whiten(advantages, mask), zero_outside(advantages + values, mask)
