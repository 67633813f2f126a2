"""Outcome advantages against a baseline from the sample's own group: RLOO, OPO, GPG, GDPO."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.algorithms.advantages.grpo import normalised_scores
from jaxrl_ppo.algorithms.advantages.inputs import AdvantageInputs, require_two_tokens
from jaxrl_ppo.algorithms.groups import centred, group_min, group_size, group_sum
from jaxrl_ppo.algorithms.masked import whiten
from jaxrl_ppo.algorithms.registry import advantage
from jaxrl_ppo.algorithms.settings import AdvantageSettings


@functools.cache
def _warn_of_single_samples() -> None:
    logging.getLogger(__name__).warning(
        "algorithm.adv_estimator=rloo: a prompt with one sample has no other to be compared with; its advantage is 0"
    )


def _notice_single_samples(inputs: AdvantageInputs) -> None:
    if np.any(np.bincount(inputs.group) == 1):
        _warn_of_single_samples()


@advantage("rloo", check=_notice_single_samples)
def rloo(inputs: AdvantageInputs, config: AdvantageSettings) -> tuple[jax.Array, jax.Array]:
    """Advantages and returns, [B, T]: a score minus the mean of the group's other scores; 0 for a group of one.

    RLOO, Ahmadian et al. 2024, arXiv 2402.14740.
    """
    size = group_size(inputs.group)
    advantages = inputs.spread(centred(inputs.scores, inputs.group) * size / jnp.maximum(size - 1, 1))
    return advantages, advantages


@advantage("opo")
def opo(inputs: AdvantageInputs, config: AdvantageSettings) -> tuple[jax.Array, jax.Array]:
    """Advantages and returns, [B, T]: a score minus the group's mean score weighted by response length.

    OPO, Hao et al. 2025, arXiv 2505.23585.
    """
    length = jnp.sum(jnp.asarray(inputs.mask) > 0, axis=-1).astype(jnp.float32)
    above_least = inputs.scores - group_min(inputs.scores, inputs.group)
    baseline = group_sum(length * above_least, inputs.group) / jnp.maximum(group_sum(length, inputs.group), 1)
    advantages = inputs.spread(above_least - baseline)
    return advantages, advantages


@advantage("gpg")
def gpg(inputs: AdvantageInputs, config: AdvantageSettings) -> tuple[jax.Array, jax.Array]:
    """Advantages and returns, [B, T]: centred scores, scaled up by the share of samples that score nothing.

    GPG, Chu et al. 2025, arXiv 2504.02546.
    """
    scores = inputs.scores
    scale = scores.shape[0] / jnp.maximum(jnp.sum(scores != 0), 1)
    advantages = inputs.spread(scale * centred(scores, inputs.group))
    return advantages, advantages


@advantage("gdpo", needs=("reward_parts", "reward_weights"), check=require_two_tokens)
def gdpo(inputs: AdvantageInputs, config: AdvantageSettings) -> tuple[jax.Array, jax.Array]:
    """Advantages and returns, [B, T]: each part of the reward as in GRPO, their weighted sum, whitened over tokens.

    GDPO, Liu et al. 2026, arXiv 2601.05242: normalised apart, no part drowns in another's spread.
    """
    by_part = jax.vmap(normalised_scores, in_axes=(1, None, None), out_axes=1)
    parts = by_part(jnp.asarray(inputs.reward_parts), inputs.group, config.norm_adv_by_std_in_grpo)
    advantages = whiten(inputs.spread(parts @ jnp.asarray(inputs.reward_weights)), inputs.mask)
    return advantages, advantages
