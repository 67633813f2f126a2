"""The rules of `reward.reward_model`."""

from __future__ import annotations

from collections.abc import Iterator

from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import Fault

KEY = "reward.reward_model"


def rewards_by_rule(config: Config) -> bool:
    """Whether a reward function scores too; without one that is named, a reward model is the whole reward."""
    reward = config.reward
    named = reward.custom_reward_function.path or reward.functions or reward.reward_manager.source == "importlib"
    return bool(named) or not reward.reward_model.enable


def reward_model(config: Config) -> Iterator[Fault]:
    """A reward model is named, has devices, and takes what it is to score."""
    settings = config.reward.reward_model
    if not settings.enable:
        return
    if not settings.model_path:
        key = f"{KEY}.model_path"
        yield Fault((key,), f"{key} must be given with {KEY}.enable=true: a sequence classifier with one label.")
    if settings.enable_resource_pool and not settings.nnodes * settings.n_gpus_per_node:
        keys = (f"{KEY}.nnodes", f"{KEY}.n_gpus_per_node")
        text = f"{keys[0]}={settings.nnodes} x {keys[1]}={settings.n_gpus_per_node}: the pool has no devices"
        yield Fault(keys, f"{text}; give it some, or set {KEY}.enable_resource_pool=false.")
    if "reward_model" in config.reward.functions:
        yield Fault(("reward.functions",), "reward.functions.reward_model: this name is the reward model's own.")
    longest = config.data.max_prompt_length + config.data.max_response_length
    if settings.forward_max_token_len_per_gpu < longest:
        key = f"{KEY}.forward_max_token_len_per_gpu"
        text = f"holds less than one longest sample, {longest} tokens"
        lengths = ("data.max_prompt_length", "data.max_response_length")
        yield Fault((key, *lengths), f"{key}={settings.forward_max_token_len_per_gpu} {text}.")
