"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): which projections have one, and PEFT's folders in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from jaxrl_ppo.models.architecture import DecoderConfig, LoraConfig
from jaxrl_ppo.models.config import ModelFolderError, read_json
from jaxrl_ppo.models.huggingface import ADAPTER_FILE
from jaxrl_ppo.models.parameters import flatten, is_adapter, nest
from jaxrl_ppo.models.tensor_plan import adapter_plan

CONFIG_FILE = "adapter_config.json"
# Hugging Face's names of the projections, and the decoder's.
PROJECTIONS = {
    "q_proj": "attention.q",
    "k_proj": "attention.k",
    "v_proj": "attention.v",
    "o_proj": "attention.o",
    "gate_proj": "mlp.gate",
    "up_proj": "mlp.up",
    "down_proj": "mlp.down",
}
# What PEFT's configuration may say without effect here; any other value makes another kind of adapter.
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "trainable_token_indices": (None, []),
}


def make_lora(
    model: DecoderConfig, rank: int, alpha: float, target: str | Sequence[str], exclude: str | Sequence[str] | None
) -> LoraConfig:
    """The adapter of `rank` on the projections `target` (names of PROJECTIONS, or "all-linear") less `exclude`.

    Experts take none: PEFT has none for them either. Raises ValueError for a name that the model does not have, and
    when no projection is left.
    """
    known = {name: path for name, path in PROJECTIONS.items() if not (model.num_experts and path.startswith("mlp."))}
    wanted = list(known) if target == "all-linear" else [target] if isinstance(target, str) else list(target)
    excluded = [exclude] if isinstance(exclude, str) else list(exclude or ())
    for key, names in (("target_modules", wanted), ("exclude_modules", excluded)):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"actor_rollout_ref.model.{key}: {model.model_type} has no projection {unknown[0]!r} that takes an "
                f"adapter; use all-linear, or some of {', '.join(known)}"
            )
    paths = tuple(path for name, path in known.items() if name in wanted and name not in excluded)
    if not paths:
        raise ValueError("actor_rollout_ref.model.target_modules: no projection is left to adapt")
    return LoraConfig(rank, float(alpha), paths)


def read_lora(folder: str | Path, model: DecoderConfig) -> LoraConfig:
    """The adapter that a PEFT folder holds.

    Raises ModelFolderError, naming file and key, when it is unreadable or of a kind that is not supported.
    """
    file = Path(folder) / CONFIG_FILE
    raw = read_json(file)
    for key, plain in PLAIN.items():
        if key in raw and raw[key] not in plain:
            raise ModelFolderError(f"{file}: {key} {raw[key]!r} is not supported; only {plain[0]!r} is")
    if not isinstance(raw.get("r"), int) or raw["r"] < 1:
        raise ModelFolderError(f"{file}: r, the adapter's rank, is {raw.get('r')!r}; it must be a positive number")
    try:
        return make_lora(model, raw["r"], raw["lora_alpha"], raw["target_modules"], raw.get("exclude_modules"))
    except KeyError as error:
        raise ModelFolderError(f"{file}: key {error} is missing") from error
    except ValueError as error:
        raise ModelFolderError(f"{file}: {error}") from error


def adapter_off(params: Mapping[str, Any]) -> dict[str, Any]:
    """The same parameters (nested, by reference) with an adapter that adds nothing: its second factors 0."""
    flat = dict(flatten(params))
    return nest({k: jax.numpy.zeros_like(v) if k.endswith(".lora_b") else v for k, v in flat.items()})


def gather_adapter(config: DecoderConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The adapter's tensors in PEFT's names, float32. Every process of the program must call it."""
    flat = {path: leaf for path, leaf in flatten(params) if is_adapter(path)}
    sharding = next(iter(flat.values())).sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    whole = {path: np.asarray(leaf) for path, leaf in jax.jit(dict, out_shardings=everywhere)(flat).items()}
    plan = adapter_plan(config)
    return {
        name: np.ascontiguousarray(entry.to_tensor(whole[entry.parameter][entry.index]), np.float32)
        for name, entry in plan.items()
    }


def save_adapter(
    folder: str | Path, config: DecoderConfig, tensors: Mapping[str, np.ndarray], base: str | Path
) -> None:
    """Write an adapter's tensors as a folder that PEFT opens on the model `base`."""
    assert config.lora is not None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / ADAPTER_FILE, metadata={"format": "pt"})
    body = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name for name, path in PROJECTIONS.items() if path in config.lora.targets],
    }
    (folder / CONFIG_FILE).write_text(json.dumps(body, indent=2))
