"""Keys of `actor_rollout_ref.rollout` and of the top-level `rollout`: generation."""

# ruff: noqa: RUF009 - key() and section() return dataclass fields, not shared values
from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_ppo.schema.keys import key, section

DEVICES = ("auto", "cuda", "rocm", "npu", "tpu", "cpu")


@dataclasses.dataclass(kw_only=True, slots=True)
class ValKwargsConfig:
    """`rollout.val_kwargs`: how validation samples."""

    top_k: int = key(-1, "Sample among the k likeliest tokens; -1: all.", ge=1, or_minus_one=True)
    top_p: float = key(1.0, "Sample among the likeliest tokens that make up this probability.", gt=0, le=1)
    temperature: float = key(0.0, "0 is greedy.", ge=0)
    n: int = key(1, "Responses per prompt.", ge=1)
    do_sample: bool = key(False, "false is greedy, whatever the temperature.")


@dataclasses.dataclass(kw_only=True, slots=True)
class MultiTurnConfig:
    """`rollout.multi_turn`: conversations with tools."""

    enable: bool = key(False, "Let the policy call tools.")
    max_assistant_turns: int | None = key(None, "The policy's turns at most; null: as many as fit.", ge=1)
    max_user_turns: int | None = key(None, "The environment's turns at most; null: as many as fit.", ge=1)
    tool_config_path: str | None = key(None, "Python file; every public function in it is a tool.")
    max_parallel_calls: int = key(1, "Calls of one turn that are made; further ones are ignored.", ge=1)
    max_tool_response_length: int = key(256, "A tool's answer is cut to so many characters.", ge=1)
    tool_response_truncate_side: str = key(
        "middle", "Which part of a longer answer goes; left keeps its beginning.", choices=("left", "middle", "right")
    )
    tool_timeout_s: float = key(30.0, "Seconds one tool call may take.", gt=0)
    format: str = key("hermes", "How the model writes tool calls.", choices=("hermes",))


@dataclasses.dataclass(kw_only=True, slots=True)
class AgentConfig:
    """`rollout.agent`: which loop turns a prompt into a response."""

    num_workers: int = key(8, "Processes that run tools.", ge=1)
    default_agent_loop: str = key(
        "single_turn_agent", "The loop of rows without agent_name; a user's class: file.py:Class."
    )
    agent_loop_config_path: str | None = key(None, "YAML file that registers more loops.")


@dataclasses.dataclass(kw_only=True, slots=True)
class CheckpointEngineConfig:
    """`rollout.checkpoint_engine`: how weights go from the trainer to the replicas."""

    update_weights_bucket_megabytes: int = key(512, "Weights travel in pieces of about this size.", ge=1)


@dataclasses.dataclass(kw_only=True, slots=True)
class EngineKwargsConfig:
    """`rollout.engine_kwargs`: further arguments of the engine, passed on as they are."""

    vllm: dict[str, Any] = key({}, "Arguments of vLLM's AsyncEngineArgs.")


@dataclasses.dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """`actor_rollout_ref.rollout`: the engine, its devices and how it samples."""

    name: str = key("auto", "The engine; auto: vllm where it is installed, else jax.", choices=("auto", "vllm", "jax"))
    temperature: float = key(1.0, "Sampling temperature; log-probs are taken after it.", gt=0)
    top_k: int = key(-1, "Sample among the k likeliest tokens; -1: all.", ge=1, or_minus_one=True)
    top_p: float = key(1.0, "Sample among the likeliest tokens that make up this probability.", gt=0, le=1)
    do_sample: bool = key(True, "false is greedy.")
    n: int = key(1, "Responses per prompt.", ge=1)
    over_sample_rate: float = key(
        0.0, "Prompts under way beyond one batch, as a share of it; the first to finish make the batch.", ge=0
    )
    seed: int = key(42, "Seed of sampling; with prompt and response index it decides a response.", ge=0)
    prompt_length: int = key(512, "Prompt tokens at most.", ge=1)
    response_length: int = key(512, "Response tokens at most.", ge=1)
    dtype: str = key("bfloat16", "Data type of the engine's weights.", choices=("bfloat16", "float16", "float32"))
    gpu_memory_utilization: float = key(0.5, "Share of a device's memory that the engine takes.", gt=0, le=1)
    free_cache_engine: bool = key(
        True, "Where trainer and rollout take turns, the engine gives up weights and cache while the trainer works."
    )
    ignore_eos: bool = key(False, "Generate on after an end token.")
    enforce_eager: bool | None = key(
        None, "vLLM: no compiled graphs; null: none with vLLM's build for CPUs, else some."
    )
    tensor_model_parallel_size: int | None = key(None, "Devices of one replica; null: 1.", ge=1)
    data_parallel_size: int = key(1, "Data-parallel ranks inside one replica.", ge=1)
    expert_parallel_size: int = key(1, "Devices that split a mixture's experts.", ge=1)
    pipeline_model_parallel_size: int = key(1, "Pipeline stages of one replica.", ge=1)
    max_num_batched_tokens: int = key(8192, "Tokens an engine step processes at most.", ge=1)
    max_model_len: int | None = key(
        None, "Prompt and response tokens at most; null: prompt_length + response_length.", ge=1
    )
    max_num_seqs: int = key(256, "Requests an engine runs at a time.", ge=1)
    enable_chunked_prefill: bool = key(True, "vLLM: mix pieces of long prompts with running requests.")
    enable_prefix_caching: bool = key(True, "Reuse the KV cache of equal prefixes.")
    logprobs_mode: str = key(
        "processed_logprobs",
        "Log-probs are taken after temperature and truncation, as training needs them.",
        choices=("processed_logprobs",),
    )
    log_prob_tolerance: float | None = key(
        None,
        "Nats per token by which engine and trainer may differ on a probe; null: what their data types explain.",
        gt=0,
    )
    load_format: str = key(
        "dummy",
        "What an engine starts with; dummy waits for the trainer's weights.",
        choices=("dummy", "auto", "safetensors"),
    )
    calculate_log_probs: bool = key(True, "Keep the engine's log-probs of the sampled tokens.")
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig)
    nnodes: int = key(1, "Rollout nodes.", ge=0)
    n_gpus_per_node: int = key(8, "Rollout devices per node.", ge=0)
    device: str | None = key(None, "Kind of the rollout devices; null: trainer.device.", choices=DEVICES)
    node_resource: str | None = key(None, "A Ray resource that only the rollout nodes have.")
    cpu_affinity: list[list[int]] | None = key(None, "CPU cores of each replica; null: no pinning.", ge=0)
    val_kwargs: ValKwargsConfig = section(ValKwargsConfig)
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    agent: AgentConfig = section(AgentConfig)
    checkpoint_engine: CheckpointEngineConfig = section(CheckpointEngineConfig)


@dataclasses.dataclass(kw_only=True, slots=True)
class RolloutPoolConfig:
    """Top-level `rollout` of one-step-off configurations: the rollout pool; copied into actor_rollout_ref.rollout."""

    nnodes: int | None = key(None, "Rollout nodes.", ge=1)
    n_gpus_per_node: int | None = key(None, "Rollout devices per node.", ge=1)
