"""Group-relative advantages: GRPO, Dr.GRPO, and its pass@k variant."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.algorithms.advantages.inputs import AdvantageInputs
from jaxrl_ppo.algorithms.groups import centred, group_min, group_size, group_std
from jaxrl_ppo.algorithms.masked import Array
from jaxrl_ppo.algorithms.registry import advantage
from jaxrl_ppo.algorithms.settings import AdvantageSettings

EPSILON = 1e-6


def normalised_scores(scores: jax.Array, group: Array, by_std: bool) -> jax.Array:
    """Scores [B] relative to their group, [B]; a group of one keeps its raw score."""
    relative = centred(scores, group)
    if by_std:
        relative = relative / (group_std(scores, group) + EPSILON)
    return jnp.where(group_size(group) > 1, relative, scores)


@advantage("grpo")
def grpo(inputs: AdvantageInputs, config: AdvantageSettings) -> tuple[jax.Array, jax.Array]:
    """Advantages and returns, [B, T]: a sample's score minus its group's mean, over the group's standard deviation.

    GRPO, Shao et al. 2024, arXiv 2402.03300. Without the division (norm_adv_by_std_in_grpo=false): Dr.GRPO, Liu et al.
    2025, arXiv 2503.20783.
    """
    advantages = inputs.spread(normalised_scores(inputs.scores, inputs.group, config.norm_adv_by_std_in_grpo))
    return advantages, advantages


def _require_pairs(inputs: AdvantageInputs) -> None:
    alone = np.flatnonzero(np.bincount(inputs.group) == 1)
    if len(alone):
        raise ValueError(
            f"grpo_passk compares a prompt's two best samples, but {len(alone)} prompts have one sample "
            "(set actor_rollout_ref.rollout.n to 2 or more)"
        )


@advantage("grpo_passk", check=_require_pairs)
def grpo_passk(inputs: AdvantageInputs, config: AdvantageSettings) -> tuple[jax.Array, jax.Array]:
    """Advantages and returns, [B, T]: only a group's best sample has one, its lead over the second best.

    Tang et al. 2025, arXiv 2503.19595: what the best of k samples owes to that one sample. Of several best samples
    the first counts as the best, and its lead is 0.
    """
    scores, group = inputs.scores, inputs.group
    samples = jnp.arange(scores.shape[0])
    best = -group_min(-scores, group)
    first_best = group_min(jnp.where(scores == best, samples, scores.shape[0]), group) == samples
    second_best = -group_min(jnp.where(first_best, jnp.inf, -scores), group)
    lead = best - second_best
    if config.norm_adv_by_std_in_grpo:
        lead = lead / (group_std(scores, group) + EPSILON)
    advantages = inputs.spread(jnp.where(first_best, lead, 0.0))
    return advantages, advantages
