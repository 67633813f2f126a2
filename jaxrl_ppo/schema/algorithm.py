"""Keys of `algorithm`: advantages, KL in the reward, group filters, rollout correction."""

# ruff: noqa: RUF009 - key() and section() return dataclass fields, not shared values
from __future__ import annotations

import dataclasses

from jaxrl_ppo.schema.actor import KL_TYPES
from jaxrl_ppo.schema.keys import key, section

ADVANTAGE_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_passk",
    "gdpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)


@dataclasses.dataclass(kw_only=True, slots=True)
class KlCtrlConfig:
    """`algorithm.kl_ctrl`: the weight of the KL penalty in the reward."""

    type: str = key("fixed", "A constant weight, or one that steers towards target_kl.", choices=("fixed", "adaptive"))
    kl_coef: float = key(1e-3, "The weight, or where it starts.", ge=0)
    horizon: int = key(10000, "adaptive: samples over which the weight adapts.", ge=1)
    target_kl: float = key(0.1, "adaptive: the KL to steer towards.", gt=0)


@dataclasses.dataclass(kw_only=True, slots=True)
class FilterGroupsConfig:
    """`algorithm.filter_groups`: DAPO's dynamic sampling, which replaces groups that carry no signal."""

    enable: bool = key(False, "Replace prompts whose samples all score the same.")
    metric: str | None = key(None, "Which number must differ: score, acc or another that the reward returns.")
    max_num_gen_batches: int = key(0, "Batches generated for one step at most; 0: no limit.", ge=0)


@dataclasses.dataclass(kw_only=True, slots=True)
class RolloutCorrectionConfig:
    """`algorithm.rollout_correction`: the difference between the rollout engine's policy and the trainer's."""

    rollout_is: str | None = key(None, "Importance weights per token or per sequence.", choices=("token", "sequence"))
    rollout_is_threshold: float | str = key(2.0, "Upper bound of a weight, or a band lo_hi outside which it is 0.")
    rollout_rs: str | None = key(None, "Rejection rules, comma-separated, e.g. token_k1,seq_mean_k3.")
    rollout_rs_threshold: float | str | None = key(
        None, "Bounds of the rules: a number or lo_hi each, comma-separated."
    )
    bypass_mode: bool = key(False, "Take the engine's log-probs as the old policy's: no extra forward pass.")
    rollout_is_batch_normalize: bool = key(False, "Divide the weights by their mean.")
    loss_type: str = key(
        "ppo_clip",
        "bypass_mode: the policy loss as configured, or the plain policy gradient with rollout_is as its only ratio.",
        choices=("ppo_clip", "reinforce"),
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class PfPpoConfig:
    """`algorithm.pf_ppo`: how PF-PPO weighs samples."""

    reweight_method: str = key(
        "pow",
        "|score|^weight_pow, the best and the worst alone, or the best four times as often as the others.",
        choices=("pow", "max_min", "max_random"),
    )
    weight_pow: float = key(2.0, "pow: the exponent.", ge=0)


@dataclasses.dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """`algorithm`: what an advantage is."""

    gamma: float = key(1.0, "Discount per token.", ge=0, le=1)
    lam: float = key(1.0, "gae: its lambda.", ge=0, le=1)
    adv_estimator: str = key(
        "gae", "The advantage estimator, or your own as file.py:name.", choices=ADVANTAGE_ESTIMATORS, user_code=True
    )
    norm_adv_by_std_in_grpo: bool = key(True, "Divide by the group's standard deviation; false is Dr.GRPO.")
    gdpo_reward_keys: list[str] = key([], "gdpo: names of the numbers that the reward function returns, each a reward.")
    gdpo_reward_weights: list[float] | None = key(None, "gdpo: their weights; null: 1 each.")
    use_pf_ppo: bool = key(False, "gae: draw the samples to learn from anew, by their scores (PF-PPO).")
    pf_ppo: PfPpoConfig = section(PfPpoConfig)
    use_kl_in_reward: bool = key(False, "Subtract a KL penalty from the reward.")
    kl_penalty: str = key("kl", "Its estimator.", choices=KL_TYPES)
    kl_ctrl: KlCtrlConfig = section(KlCtrlConfig)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
