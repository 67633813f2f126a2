"""What does not fit the estimator or the loss is told before a run starts."""

from __future__ import annotations

import pytest

from jaxrl_ppo.pipeline.algorithm_checks import check_algorithms
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import ConfigError
from jaxrl_ppo.user_code import UserCodeError

FILE = """
from jaxrl_ppo.algorithms.registry import advantage


@advantage("needs_values_and_parts", needs=("values", "reward_parts"))
def hungry(inputs, config):
    return inputs.values, inputs.values


def broken(inputs, config):
    return inputs.nothing, inputs.values
"""


def test_a_users_estimator_is_told_what_it_lacks_and_tried(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(FILE)
    config = Config()
    config.critic.enable = False
    config.algorithm.adv_estimator = f"{file}:hungry"
    with pytest.raises(ConfigError) as caught:
        check_algorithms(config)
    assert [fault.keys for fault in caught.value.faults] == [("critic.enable",), ("algorithm.gdpo_reward_keys",)]
    config.critic.enable, config.algorithm.gdpo_reward_keys = True, ["a"]
    check_algorithms(config)
    config.algorithm.adv_estimator = f"{file}:broken"
    with pytest.raises(UserCodeError, match=r"algorithm\.adv_estimator=.*own\.py:broken: AttributeError: .*line 11\)"):
        check_algorithms(config)


def test_correction_that_the_loss_cannot_take():
    config = Config()
    config.algorithm.adv_estimator = "grpo"
    config.actor_rollout_ref.actor.policy_loss.loss_mode = "dppo_tv"
    config.algorithm.rollout_correction.rollout_is = "token"
    with pytest.raises(ConfigError, match="rollout_is must be null with policy loss dppo_tv"):
        check_algorithms(config)
