"""REINFORCE with a whitened return, and with a greedy response as the baseline: REINFORCE++, ReMax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_ppo.algorithms.advantages.inputs import AdvantageInputs, require_two_tokens
from jaxrl_ppo.algorithms.groups import centred
from jaxrl_ppo.algorithms.masked import whiten, zero_outside
from jaxrl_ppo.algorithms.registry import advantage
from jaxrl_ppo.algorithms.settings import AdvantageSettings


@advantage("reinforce_plus_plus", check=require_two_tokens)
def reinforce_plus_plus(inputs: AdvantageInputs, config: AdvantageSettings) -> tuple[jax.Array, jax.Array]:
    """Advantages, the discounted return-to-go whitened over the batch's tokens, and the return itself, [B, T].

    REINFORCE++, Hu et al. 2025, arXiv 2501.03262. Tokens outside the mask are stepped over, without a discount.
    """
    mask = jnp.asarray(inputs.mask)

    def step(after: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, counted = token
        here = jnp.where(counted > 0, reward + config.gamma * after, after)
        return here, here

    rewards = zero_outside(inputs.token_rewards, mask)
    returns = jax.lax.scan(step, jnp.zeros(mask.shape[0]), (rewards.T, mask.T), reverse=True)[1].T
    return whiten(returns, mask), zero_outside(returns, mask)


@advantage("reinforce_plus_plus_baseline", check=require_two_tokens)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: AdvantageSettings) -> tuple[jax.Array, jax.Array]:
    """Advantages and returns, [B, T]: a score minus its group's mean, whitened over the batch's tokens.

    REINFORCE++ with a baseline, Hu et al. 2025, arXiv 2501.03262.
    """
    advantages = whiten(inputs.spread(centred(inputs.scores, inputs.group)), inputs.mask)
    return advantages, advantages


@advantage("remax", needs=("greedy_scores",))
def remax(inputs: AdvantageInputs, config: AdvantageSettings) -> tuple[jax.Array, jax.Array]:
    """Advantages, the return-to-go minus the score of the prompt's greedy response, and the return itself, [B, T].

    ReMax, Li et al. 2023, arXiv 2310.10505.
    """
    assert inputs.greedy_scores is not None  # for the type checker: `needs` has seen to it
    rewards = zero_outside(inputs.token_rewards, inputs.mask)
    returns = zero_outside(jnp.flip(jnp.cumsum(jnp.flip(rewards, -1), axis=-1), -1), inputs.mask)
    return returns - inputs.spread(jnp.asarray(inputs.greedy_scores, jnp.float32)), returns
