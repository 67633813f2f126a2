"""A policy the size of a contextual bandit learns to the optimum with every estimator and every loss.

Four contexts, three tokens of five actions each; the reward is the share of tokens that are right, given at the end. A
sign error anywhere sends the policy away from the optimum, and the values of no formula would show it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import settings

from jaxrl_ppo.algorithms.advantages import AdvantageInputs, advantage_function, find_advantage
from jaxrl_ppo.algorithms.aggregation import token_weights, weighted_sum
from jaxrl_ppo.algorithms.policy_losses import PolicyLossInputs, compute_policy_loss, find_policy_loss
from jaxrl_ppo.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from jaxrl_ppo.algorithms.token_rewards import place_scores
from jaxrl_ppo.algorithms.value_loss import value_loss

CONTEXTS, TOKENS, ACTIONS, SAMPLES = 4, 3, 5, 8
STEPS, EPOCHS, RATE = 120, 2, 1.0
TARGET = np.random.default_rng(0).integers(0, ACTIONS, (CONTEXTS, TOKENS))
CONTEXT = np.repeat(np.arange(CONTEXTS), SAMPLES)
MASK = np.ones((CONTEXTS * SAMPLES, TOKENS), np.float32)
CONFIG = settings()


@jax.jit
def token_log_probs(logits, actions):
    """Log-probs of the chosen actions, [B, TOKENS], from logits [CONTEXTS, TOKENS, ACTIONS]."""
    log_probs = jax.nn.log_softmax(logits)[CONTEXT]
    return jnp.take_along_axis(log_probs, actions[..., None], axis=-1)[..., 0]


@functools.cache
def policy_gradient(loss_name):
    """The loss's gradient as a compiled function of logits, actions and the other columns."""
    loss = find_policy_loss(loss_name)
    weights = token_weights(loss.aggregation or "token-mean", MASK)

    def value(logits, actions, columns):
        inputs = PolicyLossInputs(log_probs=token_log_probs(logits, actions), mask=MASK, **columns)
        return weighted_sum(compute_policy_loss(loss, inputs, CONFIG)[0], weights)

    return jax.jit(jax.grad(value))


@jax.jit
def value_gradient(table, returns):
    """The value loss's gradient with respect to a table of values [CONTEXTS, TOKENS]."""

    def value(new):
        token_loss, _ = value_loss(new[CONTEXT], table[CONTEXT], returns, MASK, 10.0)
        return weighted_sum(token_loss, token_weights("token-mean", MASK))

    return jax.grad(value)(table)


advantages_by = functools.cache(lambda estimator: advantage_function(find_advantage(estimator), CONFIG))


def learn(estimator, loss_name):
    """Train, and return how often the greedy policy is right and the policy's own probability of being right."""
    loss = find_policy_loss(loss_name)
    rng = np.random.default_rng(1)
    logits = np.zeros((CONTEXTS, TOKENS, ACTIONS), np.float32)
    values = np.zeros((CONTEXTS, TOKENS), np.float32)
    for step in range(STEPS):
        actions = np.argmax(logits[CONTEXT] + rng.gumbel(size=(*MASK.shape, ACTIONS)), axis=-1)
        right = (actions == TARGET[CONTEXT]).astype(np.float32)
        old = np.asarray(token_log_probs(logits, actions))
        inputs = AdvantageInputs(
            token_rewards=place_scores(right.mean(axis=1), MASK),
            mask=MASK,
            group=CONTEXT,
            values=values[CONTEXT],
            greedy_scores=(logits.argmax(axis=-1) == TARGET).mean(axis=1)[CONTEXT].astype(np.float32),
            reward_parts=right,
            reward_weights=np.ones(TOKENS, np.float32),
            old_log_probs=old,
            sum_pi_squared=np.square(np.asarray(jax.nn.softmax(logits))).sum(axis=-1)[CONTEXT],
        )
        advantages, returns = advantages_by(estimator)(inputs)
        columns = {"old_log_probs": old, "rollout_log_probs": old, "advantages": advantages}
        if loss.select:
            columns["selected"] = loss.select(old, advantages, MASK, CONFIG, step).astype(np.float32)
        for _ in range(EPOCHS):
            gradient = np.asarray(policy_gradient(loss_name)(logits, actions, columns))
            # One step size for all: losses differ in scale, and direction is what is tested.
            logits = logits - RATE * gradient / max(np.linalg.norm(gradient), 1e-3)
        values = values - 4.0 * np.asarray(value_gradient(values, returns))
    probabilities = np.asarray(jax.nn.softmax(logits))
    chosen = np.take_along_axis(probabilities, TARGET[..., None], axis=-1)
    return (logits.argmax(axis=-1) == TARGET).mean(), chosen.mean()


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_every_estimator_reaches_the_optimum(estimator):
    greedy, expected = learn(estimator, "vanilla")
    assert greedy == 1.0
    assert expected > 0.8


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_loss_reaches_the_optimum(loss):
    greedy, expected = learn("grpo", loss)
    assert greedy == 1.0
    assert expected > 0.8
