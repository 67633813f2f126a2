"""Names and rules that the schema repeats, since it may not import the other parts, are those of the other parts."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import optax
import pytest

from jaxrl_ppo.algorithms import kl, rejection
from jaxrl_ppo.algorithms.advantages import find_advantage
from jaxrl_ppo.algorithms.aggregation import LOSS_AGG_MODES
from jaxrl_ppo.algorithms.correction import check_settings
from jaxrl_ppo.algorithms.policy_losses import find_policy_loss
from jaxrl_ppo.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from jaxrl_ppo.observability import trackers
from jaxrl_ppo.schema import actor, algorithm, no_effect, rules_correction, sizes, trainer
from jaxrl_ppo.schema.config import Config, PolicyLossConfig, RolloutCorrectionConfig
from jaxrl_ppo.sharding import rules


def test_optimizers() -> None:
    for names, decays in ((actor.OPTIMIZERS_WITH_DECAY, True), (actor.OPTIMIZERS_WITHOUT_DECAY, False)):
        for name in names:
            accepted = inspect.signature(getattr(optax, name)).parameters
            assert "learning_rate" in accepted
            assert ("weight_decay" in accepted and "mask" in accepted) == decays, name


def test_estimators_and_losses() -> None:
    assert find_advantage("grpo").name == "grpo"
    # Other tests' own estimators and losses stay registered in their process.
    advantages = {name for name, one in ADVANTAGES.items() if one.function.__module__.startswith("jaxrl_ppo.")}
    losses = {name: one for name, one in POLICY_LOSSES.items() if one.function.__module__.startswith("jaxrl_ppo.")}
    assert set(algorithm.ADVANTAGE_ESTIMATORS) == advantages
    assert set(actor.POLICY_LOSSES) == set(losses)
    assert {name for name, loss in losses.items() if loss.aggregation} == set(no_effect.OWN_AGGREGATION)
    needing = {name for name, loss in losses.items() if "rollout_log_probs" in loss.needs}
    assert needing == set(rules_correction.TO_ROLLOUT_POLICY)


def test_aggregation_modes_and_mesh_axes() -> None:
    assert actor.LOSS_AGG_MODES == LOSS_AGG_MODES
    assert sizes.MESH_AXES == rules.MESH_AXES
    assert set(rules_correction.REJECTION_RULES) == set(rejection.RULES)


@pytest.mark.parametrize("kind", actor.KL_TYPES)
def test_kl_estimators(kind: str) -> None:
    ones = np.ones((1, 2), np.float32)
    assert kl.kl_penalty(ones, ones, ones, kind).shape == (1, 2)


def test_trackers() -> None:
    assert set(trainer.TRACKERS) == {trackers.CONSOLE, *trackers._backends()}


@pytest.mark.parametrize("bypass", [False, True])
def test_rollout_correction_is_judged_as_the_algorithms_judge_it(bypass: bool) -> None:
    thresholds = (1.5, 0.5, "0.5_2.0", "2_1", "x", "0", "0_2", "1_2_3")
    rejections = [(None, None), (None, 2.0), ("token_k1", None), ("token_k9", 2.0), ("token_k1,seq_mean_k3", "1_2,0.1")]
    rejections += [(f"seq_sum_{kind}", bound) for kind in ("k1", "k2") for bound in thresholds]
    rejections += [("token_k1, seq_max_k2", 2.0), ("token_k1,seq_max_k2,token_k3", "2.0,0.1")]
    weights = [(None, 2.0, False), ("token", 2.0, True)]
    weights += [("sequence", bound, False) for bound in thresholds]
    refused = 0
    for (kind, bound, normalise), (rule, limits), loss in itertools.product(
        weights, rejections, ("vanilla", "dppo_tv")
    ):
        section = RolloutCorrectionConfig(
            rollout_is=kind,
            rollout_is_threshold=bound,
            rollout_is_batch_normalize=normalise,
            rollout_rs=rule,
            rollout_rs_threshold=limits,
            bypass_mode=bypass,
        )
        config = Config()
        config.algorithm.rollout_correction = section
        config.actor_rollout_ref.actor.policy_loss = PolicyLossConfig(loss_mode=loss)
        ours = bool(list(rules_correction.rollout_correction(config)))
        assert ours == bool(check_settings(section, find_policy_loss(loss))), section
        refused += ours
    assert refused
