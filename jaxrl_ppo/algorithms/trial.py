"""A user's estimator and loss tried on made-up samples before a run starts, so that what is broken shows at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.algorithms.advantages import advantage_function
from jaxrl_ppo.algorithms.advantages.inputs import AdvantageInputs
from jaxrl_ppo.algorithms.policy_losses import PolicyLossInputs, compute_policy_loss
from jaxrl_ppo.algorithms.registry import Advantage, PolicyLoss
from jaxrl_ppo.algorithms.settings import AdvantageSettings, PolicyLossSettings
from jaxrl_ppo.user_code import UserCodeError

SAMPLES, TOKENS, PARTS = 4, 3, 2


def try_advantage(estimator: Advantage, config: AdvantageSettings) -> None:
    """Run an estimator on two prompts' samples. Raises UserCodeError for what it does wrongly."""
    try:
        _run_advantage(estimator, config)
    except ValueError as error:
        raise UserCodeError(f"{error} (tried on made-up samples)") from error


def _run_advantage(estimator: Advantage, config: AdvantageSettings) -> None:
    ones = np.ones((SAMPLES, TOKENS), np.float32)
    ramp = np.linspace(-1, 1, SAMPLES * TOKENS, dtype=np.float32).reshape(SAMPLES, TOKENS)
    advantage_function(estimator, config)(
        AdvantageInputs(
            token_rewards=ramp,
            mask=ones,
            group=np.repeat(np.arange(SAMPLES // 2), 2),
            values=ramp,
            greedy_scores=ones[:, 0],
            reward_parts=np.ones((SAMPLES, PARTS), np.float32),
            reward_weights=np.ones(PARTS, np.float32),
            old_log_probs=ramp - 2,
            sum_pi_squared=ones / 2,
        )
    )


def try_policy_loss(loss: PolicyLoss, config: PolicyLossSettings) -> None:
    """Trace a loss as the update will, with its selection. Raises UserCodeError for what it does wrongly."""
    ones = np.ones((SAMPLES, TOKENS), np.float32)
    log_probs = np.linspace(-3, -1, SAMPLES * TOKENS, dtype=np.float32).reshape(SAMPLES, TOKENS)
    selected = None if loss.select is None else jnp.asarray(loss.select(log_probs, ones, ones, config, 0), jnp.float32)

    def total(log_probs: jax.Array) -> jax.Array:
        inputs = PolicyLossInputs(
            log_probs=log_probs,
            old_log_probs=log_probs,
            advantages=jnp.asarray(ones),
            mask=jnp.asarray(ones),
            rollout_log_probs=log_probs,
            entropy=log_probs,
            selected=selected,
        )
        return jnp.sum(compute_policy_loss(loss, inputs, config)[0])

    jax.eval_shape(jax.grad(total), log_probs)
