"""The rules of `reward.reward_model`."""

from __future__ import annotations

from collections.abc import Iterator

from jaxrl_ppo.schema import sizes
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import Fault

KEY = "reward.reward_model"
SERVER = f"{KEY}.rollout"
# Arguments of vLLM's server that the run decides.
OURS = ("model", "served_model_name", "host", "port", "worker_extension_cls")


def functions_named(config: Config) -> bool:
    """Whether a reward function, or a manager, is the user's choice rather than the scorer of the data source."""
    reward = config.reward
    named = reward.custom_reward_function.path or reward.functions or reward.reward_manager.source == "importlib"
    return bool(named)


def judge_served(config: Config) -> bool:
    """Whether the reward model is a generative judge: behind servers, for the reward function to ask.

    As in verl, a reward model that no function asks is a classifier, whatever is to serve it.
    """
    model = config.reward.reward_model
    return model.enable and model.rollout.name is not None and functions_named(config)


def rewards_by_rule(config: Config) -> bool:
    """Whether a reward function scores; without one that is named, a reward model is the whole reward."""
    return functions_named(config) or not config.reward.reward_model.enable


def reward_model(config: Config) -> Iterator[Fault]:
    """A reward model is named, has devices, and takes what it is to score."""
    settings = config.reward.reward_model
    if not settings.enable:
        return
    if not settings.model_path:
        key, kind = f"{KEY}.model_path", "a sequence classifier with one label"
        if judge_served(config):
            kind = "the judge"
        yield Fault((key,), f"{key} must be given with {KEY}.enable=true: {kind}.")
    keys = (f"{KEY}.nnodes", f"{KEY}.n_gpus_per_node")
    if settings.enable_resource_pool and not settings.nnodes * settings.n_gpus_per_node:
        text = f"{keys[0]}={settings.nnodes} x {keys[1]}={settings.n_gpus_per_node}: the pool has no devices"
        yield Fault(keys, f"{text}; give it some, or set {KEY}.enable_resource_pool=false.")
    if judge_served(config):
        yield from _judge(config, keys)
        return
    if "reward_model" in config.reward.functions:
        yield Fault(("reward.functions",), "reward.functions.reward_model: this name is the reward model's own.")
    longest = config.data.max_prompt_length + config.data.max_response_length
    if settings.forward_max_token_len_per_gpu < longest:
        key = f"{KEY}.forward_max_token_len_per_gpu"
        text = f"holds less than one longest sample, {longest} tokens"
        lengths = ("data.max_prompt_length", "data.max_response_length")
        yield Fault((key, *lengths), f"{key}={settings.forward_max_token_len_per_gpu} {text}.")


def _judge(config: Config, pool: tuple[str, ...]) -> Iterator[Fault]:
    settings, judge = config.reward.reward_model, config.reward.reward_model.rollout
    each, name = sizes.judge_devices(config), f"{SERVER}.name={judge.name}"
    if not settings.enable_resource_pool:
        keys = (f"{SERVER}.name", f"{KEY}.enable_resource_pool")
        text = f"the judge's servers need devices of their own: {keys[1]}=true, with {pool[0]} and .n_gpus_per_node"
        yield Fault(keys, f"{name}: {text}.")
    parallel = tuple(f"{SERVER}.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "data"))
    if settings.n_gpus_per_node % each:
        text = f"does not hold whole servers of {each} devices, and none spans nodes ({', '.join(parallel)})"
        yield Fault((pool[1], *parallel), f"{pool[1]}={settings.n_gpus_per_node} {text}.")
    if judge.expert_parallel_size > each:
        key = f"{SERVER}.expert_parallel_size"
        yield Fault(
            (key, *parallel), f"{key}={judge.expert_parallel_size} is more than the {each} devices of a server."
        )
    if not judge.enable_chunked_prefill and judge.max_num_batched_tokens < (judge.max_model_len or 0):
        limits = (f"{SERVER}.max_num_batched_tokens", f"{SERVER}.max_model_len", f"{SERVER}.enable_chunked_prefill")
        text = f"is less than {limits[1]}={judge.max_model_len}, and enable_chunked_prefill=false"
        yield Fault(limits, f"{limits[0]}={judge.max_num_batched_tokens} {text}.")
    for taken in sorted(set(OURS) & {argument.replace("-", "_") for argument in judge.engine_kwargs.vllm}):
        key = f"{SERVER}.engine_kwargs"
        yield Fault((key,), f"{key}.vllm.{taken} cannot be set: the run decides it.")
