"""Keys of `data` and `reward`: where prompts come from and how responses are scored."""

# ruff: noqa: RUF009 - key() and section() return dataclass fields, not shared values
from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_ppo.schema.keys import key, section
from jaxrl_ppo.schema.rollout import EngineKwargsConfig


@dataclasses.dataclass(kw_only=True, slots=True)
class CustomClassConfig:
    """`data.custom_cls`: a data set class from a user's file."""

    path: str | None = key(None, "Python file.")
    name: str | None = key(None, "Class in it.")


@dataclasses.dataclass(kw_only=True, slots=True)
class SamplerConfig:
    """`data.sampler`: a curriculum sampler from a user's file."""

    class_path: str | None = key(None, "Python file.")
    class_name: str | None = key(None, "Class in it.")


@dataclasses.dataclass(kw_only=True, slots=True)
class DataConfig:
    """`data`: files, columns, lengths, order."""

    train_files: str | list[str] | None = key(None, "Training files: parquet, json or jsonl. Required.")
    val_files: str | list[str] | None = key(None, "Validation files; null: no validation.")
    train_files_weights: list[float] | None = key(
        None, "How much of each training file an epoch holds, in proportion; null: every row once.", gt=0
    )
    train_max_samples: int = key(-1, "Use so many rows; -1: all.", ge=1, or_minus_one=True)
    val_max_samples: int = key(-1, "Use so many rows; -1: all.", ge=1, or_minus_one=True)
    prompt_key: str = key("prompt", "Column of the messages.")
    reward_fn_key: str = key("data_source", "Column that tells the reward function which kind of task it is.")
    max_prompt_length: int = key(512, "Prompt tokens at most.", ge=1)
    max_response_length: int = key(512, "Response tokens at most.", ge=1)
    train_batch_size: int = key(1024, "Prompts per step.", ge=1)
    gen_batch_size: int | None = key(None, "Prompts generated at a time; null: train_batch_size.", ge=1)
    val_batch_size: int | None = key(None, "Validation prompts at a time; null: all.", ge=1)
    shuffle: bool = key(True, "Shuffle the training rows in every epoch.")
    seed: int | None = key(None, "Seed of that shuffle; null: 1.", ge=0)
    validation_shuffle: bool = key(False, "Shuffle the validation rows.")
    filter_overlong_prompts: bool = key(False, "Drop rows whose prompt is longer than max_prompt_length.")
    filter_overlong_prompts_workers: int = key(1, "Processes that do it.", ge=1)
    truncation: str = key("error", "What to do with a longer prompt.", choices=("error", "left", "right", "middle"))
    system_prompt: str | None = key(None, "System message of prompts that have none of their own.")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "Further arguments of the chat template.")
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    sampler: SamplerConfig = section(SamplerConfig)
    dataloader_num_workers: int = key(8, "Threads that read and tokenise prompts ahead; 0: none.", ge=0)


@dataclasses.dataclass(kw_only=True, slots=True)
class CustomRewardFunctionConfig:
    """`reward.custom_reward_function`: a reward function from a user's file."""

    path: str | None = key(None, "Python file; null: the scorer that belongs to the row's data_source.")
    name: str = key("compute_score", "Function in it.")
    reward_kwargs: dict[str, Any] = key({}, "Further arguments of the function.")


@dataclasses.dataclass(kw_only=True, slots=True)
class RewardManagerModuleConfig:
    """`reward.reward_manager.module`: a reward manager from a user's file."""

    path: str | None = key(None, "Python file.")
    name: str | None = key(None, "Class in it.")


@dataclasses.dataclass(kw_only=True, slots=True)
class RewardManagerConfig:
    """`reward.reward_manager`: what turns a function's result into a sample's reward."""

    source: str = key("register", "One of ours, or a user's.", choices=("register", "importlib"))
    name: str = key("naive", "Which of ours.", choices=("naive", "dapo", "batch"))
    module: RewardManagerModuleConfig = section(RewardManagerModuleConfig)


@dataclasses.dataclass(kw_only=True, slots=True)
class OverlongBufferConfig:
    """`reward.reward_kwargs.overlong_buffer_cfg`: DAPO's soft penalty on overlong responses."""

    enable: bool = key(False, "Apply the penalty.")
    len: int = key(0, "Length of the stretch before max_resp_len in which it grows.", ge=0)
    penalty_factor: float = key(1.0, "Penalty at the end of that stretch.", ge=0)
    log: bool = key(False, "Report the penalty as a metric.")


@dataclasses.dataclass(kw_only=True, slots=True)
class RewardKwargsConfig:
    """`reward.reward_kwargs`: settings of the reward managers."""

    overlong_buffer_cfg: OverlongBufferConfig = section(OverlongBufferConfig)
    max_resp_len: int | None = key(None, "Length the penalty counts from; null: data.max_response_length.", ge=1)


@dataclasses.dataclass(kw_only=True, slots=True)
class RewardModelRolloutConfig:
    """`reward.reward_model.rollout`: the server of a generative judge."""

    name: str | None = key(
        None,
        "vllm: a generative judge behind vLLM's OpenAI-compatible server, which the reward function asks; "
        "null: a classifier.",
        choices=("vllm",),
    )
    dtype: str = key("bfloat16", "Data type of its weights.", choices=("bfloat16", "float16", "float32"))
    gpu_memory_utilization: float = key(0.5, "Share of a device's memory that a server takes.", gt=0, le=1)
    enforce_eager: bool = key(True, "No compiled graphs.")
    tensor_model_parallel_size: int = key(1, "Devices of one server.", ge=1)
    pipeline_model_parallel_size: int = key(1, "Pipeline stages of one server.", ge=1)
    data_parallel_size: int = key(1, "Data-parallel ranks inside one server.", ge=1)
    expert_parallel_size: int = key(1, "Devices that split a mixture's experts.", ge=1)
    prompt_length: int = key(2048, "Tokens of what the judge is asked, at most.", ge=1)
    response_length: int = key(2048, "Tokens of what it says, at most.", ge=1)
    max_model_len: int | None = key(None, "Both together; null: prompt_length + response_length.", ge=1)
    max_num_batched_tokens: int = key(8192, "Tokens an engine step processes at most.", ge=1)
    max_num_seqs: int = key(1024, "Requests a server runs at a time.", ge=1)
    enable_chunked_prefill: bool = key(True, "Mix pieces of long prompts with running requests.")
    enable_prefix_caching: bool = key(True, "Reuse the KV cache of equal prefixes.")
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig)


@dataclasses.dataclass(kw_only=True, slots=True)
class RewardModelConfig:
    """`reward.reward_model`: a model that scores responses."""

    enable: bool = key(False, "Use a reward model.")
    enable_resource_pool: bool = key(False, "Give it devices of its own; false: the trainer's.")
    n_gpus_per_node: int = key(8, "Its devices per node.", ge=0)
    nnodes: int = key(0, "Its nodes.", ge=0)
    model_path: str | None = key(
        None, "Hugging Face folder or hub id of a sequence classifier with one label, or of a judge."
    )
    weight: float = key(1.0, "What its score counts beside the reward function's value.")
    forward_max_token_len_per_gpu: int = key(32768, "Tokens scored at a time on one device.", ge=1)
    rollout: RewardModelRolloutConfig = section(RewardModelRolloutConfig)


@dataclasses.dataclass(kw_only=True, slots=True)
class SandboxFusionConfig:
    """`reward.sandbox_fusion`: a service that runs generated code."""

    url: str | None = key(None, "Address of the service's run_code.")
    max_concurrent: int = key(64, "Calls at a time.", ge=1)
    memory_limit_mb: int = key(1024, "Memory of one call.", ge=1)


@dataclasses.dataclass(kw_only=True, slots=True)
class RewardConfig:
    """`reward`: how responses are scored."""

    num_workers: int = key(8, "Reward processes.", ge=1)
    timeout_s: float = key(60.0, "Seconds one sample's reward may take.", gt=0)
    worker_memory_mb: int | None = key(4096, "Memory of one reward process; null: no limit.", ge=64)
    max_failure_rate: float = key(0.5, "The run stops when a larger share of a batch's rewards fail.", ge=0, le=1)
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig)
    functions: dict[str, Any] = key(
        {}, "Several reward functions by name: {path, name, weight, reward_kwargs}; the reward is their weighted sum."
    )
    run_code_locally: bool = key(
        False, "Run code that the model writes on this machine, in limited subprocesses: no protection from malice."
    )
    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
    reward_kwargs: RewardKwargsConfig = section(RewardKwargsConfig)
    reward_model: RewardModelConfig = section(RewardModelConfig)
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig)
