"""The JAX engine's copy of a model's weights: each layer's own arrays, from checkpoint tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.huggingface import Checkpoint, check_coverage, list_faults
from jaxrl_ppo.models.parameters import nest
from jaxrl_ppo.models.tensor_plan import TensorEntry, tensor_plan
from jaxrl_ppo.weights.manifest import WeightError, WeightManifest
from jaxrl_ppo.weights.reader import read_tensors

LAYERS = "layers."
SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def read_version(manifest: WeightManifest, config: DecoderConfig, dtype: Any) -> dict[str, Any]:
    """A committed weight version as engine parameters in `dtype`.

    Raises WeightError listing every missing, unknown or mis-shaped tensor before any is read, and for a tensor whose
    bytes do not match its checksum.
    """
    headers = {
        name: (record.shape, SAFETENSORS_NAMES.get(record.dtype, record.dtype))
        for name, record in manifest.tensors.items()
    }
    if faults := check_coverage(headers, config):
        raise WeightError(f"weight version {manifest.version} does not fit the model: " + list_faults(faults))
    return engine_params(read_tensors(manifest), config, dtype)


def read_folder(folder: str | Path, config: DecoderConfig, dtype: Any) -> dict[str, Any]:
    """A Hugging Face folder as engine parameters in `dtype`. Raises ModelFolderError when it does not fit."""
    checkpoint = Checkpoint(folder)
    checkpoint.check(config)
    tensors = ((name, checkpoint.read(name, (slice(None),) * len(e.shape))) for name, e in tensor_plan(config).items())
    return engine_params(tensors, config, dtype)


def engine_params(tensors: Iterable[tuple[str, Any]], config: DecoderConfig, dtype: Any) -> dict[str, Any]:
    """{"embed": ..., "layers": [each layer's parameters], "final_norm": ..., "lm_head": ... unless tied}.

    Layers are separate arrays because a decode step, unlike a training step, is too short to copy each layer's weights
    out of a stack first. Tensors are put into place one by one as they come.
    """
    plan = tensor_plan(config)
    experts: dict[tuple[int, str], list[Any]] = {}
    single: dict[str, Any] = {}
    layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
    for name, tensor in tensors:
        entry = plan.get(name)
        if entry is None:  # a tied head or a buffer, which check_coverage lets pass
            continue
        block = _place(tensor, entry.block_shape, entry.layout, np.dtype(dtype))
        if not entry.parameter.startswith(LAYERS):
            single[entry.parameter] = block
            continue
        layer, *expert = entry.index
        path = entry.parameter.removeprefix(LAYERS)
        if expert:
            blocks = experts.setdefault((layer, path), [None] * config.num_experts)
            blocks[expert[0]] = block
            if any(b is None for b in blocks):
                continue
            block = jnp.stack(experts.pop((layer, path)))
        layers[layer][path] = block
    return nest(single) | {"layers": [nest(layer) for layer in layers]}


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _place(
    tensor: Any, block_shape: tuple[int, ...], layout: tuple[tuple[int, ...], ...], dtype: np.dtype
) -> jax.Array:
    return TensorEntry("", "", (), block_shape, layout).to_block(tensor).astype(dtype)
