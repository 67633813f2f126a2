"""Hugging Face folders in: safetensors read slice by slice, straight into each device's shard."""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.config import ModelFolderError
from jaxrl_ppo.models.parameters import flatten, parameter_specs, to_state
from jaxrl_ppo.models.tensor_plan import TensorEntry, adapter_plan, tensor_plan

SINGLE_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"  # PEFT's
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}


class Checkpoint:
    """The safetensors files of a folder, opened lazily; `bytes_read` counts tensor bytes taken from them."""

    def __init__(self, folder: str | Path, single_file: str = SINGLE_FILE):
        """`single_file` is the file where there is no index.

        Raises ModelFolderError when the folder holds no readable safetensors checkpoint.
        """
        self.folder = Path(folder)
        self.bytes_read = 0
        self._files: dict[str, Any] = {}
        index = self.folder / INDEX_FILE
        if index.exists():
            try:
                self._file_of: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ModelFolderError(f"{index} is not a readable safetensors index ({error!r})") from error
        elif (self.folder / single_file).exists():
            self._file_of = dict.fromkeys(self._open(single_file).keys(), single_file)
        else:
            raise ModelFolderError(f"{self.folder} has neither {single_file} nor {INDEX_FILE}: no weights to read")

    @property
    def names(self) -> set[str]:
        """Names of the tensors it holds."""
        return set(self._file_of)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and safetensors dtype name of a tensor, without reading it."""
        tensor = self._slice(name)
        return tuple(tensor.get_shape()), tensor.get_dtype()

    def read(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        """The part of a tensor that `where` (a slice per dimension) selects."""
        part = self._slice(name)[where]
        self.bytes_read += part.nbytes
        return part

    def check(self, config: DecoderConfig) -> None:
        """Raise ModelFolderError listing every missing, unknown and mis-shaped tensor for a model of `config`."""
        if faults := check_coverage({name: self.header(name) for name in self.names}, config):
            raise ModelFolderError(f"{self.folder} does not fit its config.json: " + list_faults(faults))

    def check_plan(self, plan: Mapping[str, TensorEntry]) -> None:
        """Raise ModelFolderError listing every tensor that is not as in `plan`."""
        if faults := _faults({name: self.header(name) for name in self.names}, plan):
            raise ModelFolderError(f"{self.folder} does not fit its configuration: " + list_faults(faults))

    def _slice(self, name: str) -> Any:
        try:
            return self._open(self._file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise ModelFolderError(f"{self.folder / self._file_of[name]}: tensor {name}: {error}") from error

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.folder / file, framework="numpy")
            except (OSError, SafetensorError) as error:
                raise ModelFolderError(f"{self.folder / file} is not a readable safetensors file: {error}") from error
        return self._files[file]


def check_coverage(headers: Mapping[str, tuple[tuple[int, ...], str]], config: DecoderConfig) -> list[str]:
    """What is wrong with a set of tensors (name -> shape, dtype) as weights of `config`; empty if nothing is.

    A tied model may carry its head a second time, and buffers that some exporters write are passed over. A value head
    may be missing, or its bias: it is then a new one; the head of the language model below it is passed over.
    """
    plan = tensor_plan(config)
    new = {n for n, entry in plan.items() if config.head == "value" and entry.parameter.startswith("score.")}
    headers = {name: header for name, header in headers.items() if name in plan or not _ignorable(name, config)}
    return _faults(headers, plan, new)


def _faults(
    headers: Mapping[str, tuple[tuple[int, ...], str]], plan: Mapping[str, TensorEntry], optional: Collection[str] = ()
) -> list[str]:
    faults = [f"missing tensor {name}" for name in plan if name not in headers and name not in optional]
    faults += [f"unknown tensor {name}" for name in sorted(headers) if name not in plan]
    for name, entry in plan.items():
        if name not in headers:
            continue
        shape, dtype = headers[name]
        if shape != entry.shape:
            faults.append(f"tensor {name} has shape {list(shape)}, expected {list(entry.shape)}")
        if dtype not in DTYPES:
            faults.append(f"tensor {name} has dtype {dtype}, expected one of {', '.join(DTYPES)}")
    return faults


def list_faults(faults: list[str], limit: int = 10) -> str:
    """The first faults as one line."""
    return "; ".join(faults[:limit]) + (f" and {len(faults) - limit} more" if len(faults) > limit else "")


def _ignorable(name: str, config: DecoderConfig) -> bool:
    spare_head = name == "lm_head.weight" and (config.tie_embeddings or config.head != "lm")
    return spare_head or name.endswith("rotary_emb.inv_freq")


def load_params(
    folder: str | Path,
    config: DecoderConfig,
    *,
    shardings: Any = None,
    dtype: Any = jnp.float32,
    seed: int = 0,
    adapter: str | Path | None = None,
) -> nnx.State:
    """Parameters of a Hugging Face folder as the state of a `Decoder`, cast to `dtype`.

    `shardings` is a pytree of Sharding like the parameters (nested dict or nnx.State), or None for one default
    device. Each process reads only the slices that its own devices hold. A value head that the folder does not have is
    drawn anew from `seed`, normal with deviation 1 / (hidden size + 1), its bias 0. A LoRA adapter comes from
    `adapter`, a PEFT folder, or is drawn too.

    Raises ModelFolderError listing every missing, unknown and mis-shaped tensor before any is read.
    """
    checkpoint = Checkpoint(folder)
    checkpoint.check(config)
    sources = [(checkpoint, tensor_plan(config))]
    if adapter is not None:
        sources.append((Checkpoint(adapter, ADAPTER_FILE), adapter_plan(config)))
        sources[1][0].check_plan(sources[1][1])
    held: dict[str, tuple[Checkpoint, dict[tuple[int, ...], TensorEntry]]] = {}
    for source, plan in sources:
        for entry in plan.values():
            if entry.name in source.names:
                held.setdefault(entry.parameter, (source, {}))[1][entry.index] = entry
    shards = dict(flatten(shardings)) if shardings is not None else {}
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    flat = {}
    for path, spec in parameter_specs(config).items():
        sharding = shards.get(path, default)
        sharding = sharding.get_value() if isinstance(sharding, nnx.Variable) else sharding

        if path in held:
            # Devices that hold the same slice share one read.
            read = _memoised(functools.partial(_read_block, *held[path], spec.shape, dtype))
        else:
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
            read = np.asarray(spec.initializer(key, spec.shape, dtype)).__getitem__
        flat[path] = jax.make_array_from_callback(spec.shape, sharding, read)
    return to_state(flat, config)


def _memoised(read: Callable[[tuple[slice, ...]], np.ndarray]) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    parts: dict[str, np.ndarray] = {}

    def memoised(where: tuple[slice, ...] | None) -> np.ndarray:
        assert where is not None
        key = str(where)  # slices are not hashable before Python 3.12
        if key not in parts:
            parts[key] = read(where)
        return parts[key]

    return memoised


def _read_block(
    checkpoint: Checkpoint,
    entries: dict[tuple[int, ...], TensorEntry],
    shape: tuple[int, ...],
    dtype: Any,
    where: tuple[slice, ...],
) -> np.ndarray:
    """The part `where` of a stacked parameter of full `shape`, put together from its tensors."""
    bounds = [axis.indices(size)[:2] for axis, size in zip(where, shape)]
    stacked = len(next(iter(entries)))
    out = np.empty([stop - start for start, stop in bounds], dtype)
    for index in np.ndindex(*out.shape[:stacked]):
        entry = entries[tuple(start + i for (start, _), i in zip(bounds, index))]
        out[index] = _read_part(checkpoint, entry, bounds[stacked:])
    return out


def _read_part(checkpoint: Checkpoint, entry: TensorEntry, bounds: list[tuple[int, int]]) -> np.ndarray:
    """The part of a block within `bounds`, reading no more of the tensor than the merged dimensions force."""
    where, sizes, cut = [], list(entry.block_shape), [slice(start, stop) for start, stop in bounds]
    for group in entry.layout:
        first, *inner = group
        start, stop = bounds[first]
        stride = math.prod(entry.block_shape[axis] for axis in inner)
        where.append(slice(start * stride, stop * stride))
        sizes[first], cut[first] = stop - start, slice(None)
    tensor = checkpoint.read(entry.name, tuple(where))
    part = TensorEntry(entry.name, entry.parameter, entry.index, tuple(sizes), entry.layout).to_block(tensor)
    return part[tuple(cut)]
