"""What estimator and policy loss of a configuration need, checked, and a user's own tried, before a run starts."""

from __future__ import annotations

from jaxrl_ppo.algorithms.advantages import find_advantage
from jaxrl_ppo.algorithms.correction import KEY, check_settings
from jaxrl_ppo.algorithms.policy_losses import configured_policy_loss
from jaxrl_ppo.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from jaxrl_ppo.algorithms.trial import try_advantage, try_policy_loss
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import ConfigError, Fault


def check_algorithms(config: Config) -> None:
    """Raises ConfigError for settings that do not fit, UserCodeError for a user's code that is missing or broken."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    known_loss = actor.policy_loss.loss_mode in POLICY_LOSSES  # as registered before a user's file is loaded
    known_estimator = algorithm.adv_estimator in ADVANTAGES
    loss = configured_policy_loss(actor.policy_loss.loss_mode, algorithm.rollout_correction)
    estimator = find_advantage(algorithm.adv_estimator)
    faults = [Fault((KEY,), fault) for fault in check_settings(algorithm.rollout_correction, loss)]
    if "values" in estimator.needs and not config.critic.enable:
        text = f"algorithm.adv_estimator={algorithm.adv_estimator} needs values: set critic.enable=true"
        faults.append(Fault(("critic.enable",), text + "."))
    if "reward_parts" in estimator.needs and not algorithm.gdpo_reward_keys:
        text = f"algorithm.adv_estimator={algorithm.adv_estimator} needs the parts of the reward"
        faults.append(Fault(("algorithm.gdpo_reward_keys",), f"{text}: name them in algorithm.gdpo_reward_keys."))
    if faults:
        raise ConfigError(faults)
    if not known_estimator:
        try_advantage(estimator, algorithm)
    if not known_loss:
        try_policy_loss(loss, actor)
