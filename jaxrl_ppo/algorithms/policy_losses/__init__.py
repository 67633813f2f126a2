"""Policy losses by name. A new one is a function with a registration line, and an import here."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_ppo.algorithms.masked import zero_outside
from jaxrl_ppo.algorithms.policy_losses import covariance, dppo, policy_gradient, sequence_level, vanilla  # noqa: F401 - register
from jaxrl_ppo.algorithms.policy_losses.inputs import PolicyLossInputs
from jaxrl_ppo.algorithms.registry import POLICY_LOSSES, PolicyLoss, find
from jaxrl_ppo.algorithms.settings import CorrectionSettings, PolicyLossSettings
from jaxrl_ppo.user_code import UserCodeError


def find_policy_loss(spec: str) -> PolicyLoss:
    """The policy loss called `spec`: a registered name or a user's `path/to/file.py:name`.

    Raises UserCodeError when there is none, naming actor_rollout_ref.actor.policy_loss.loss_mode.
    """
    return find(POLICY_LOSSES, PolicyLoss, spec, "actor_rollout_ref.actor.policy_loss.loss_mode")


def configured_policy_loss(loss_mode: str, correction: CorrectionSettings) -> PolicyLoss:
    """The loss of a run: `loss_mode`, unless rollout correction asks for the plain policy gradient in bypass mode.

    There the importance weights are the only ratio (verl's `loss_type=reinforce`). Raises as find_policy_loss.
    """
    return find_policy_loss("gpg" if correction.bypass_mode and correction.loss_type == "reinforce" else loss_mode)


def compute_policy_loss(
    loss: PolicyLoss, inputs: PolicyLossInputs, config: PolicyLossSettings
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`loss` of each token [..., T], times the importance weights of rollout correction, and its metrics [..., T].

    Both are 0 outside the mask. A metric is to be averaged over the mask of the whole mini-batch; none has a gradient.
    Raises ValueError when a field that the loss needs is missing, UserCodeError when a user's loss fails or does
    not return that.
    """
    needed = (*loss.needs, *(("selected",) if loss.select else ()))
    missing = [name for name in needed if getattr(inputs, name) is None]
    if missing:
        raise ValueError(f"policy loss {loss.name} needs {', '.join(missing)}")
    result = loss.function(inputs, config)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise UserCodeError(f"policy loss {loss.name} must return the loss of each token and a dict of metrics")
    token_loss, metrics = result
    for name, value in {"the loss": token_loss, **metrics}.items():
        if jnp.shape(value) != inputs.mask.shape:
            raise UserCodeError(
                f"policy loss {loss.name}: {name} has shape {jnp.shape(value)}, not one value per token, "
                f"{inputs.mask.shape}; aggregation is the caller's"
            )
    if inputs.importance_weights is not None:
        token_loss = token_loss * inputs.importance_weights
    metrics = {name: jax.lax.stop_gradient(zero_outside(value, inputs.mask)) for name, value in metrics.items()}
    return zero_outside(token_loss, inputs.mask), metrics
