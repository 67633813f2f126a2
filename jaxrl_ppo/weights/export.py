"""The trainer's sharded parameters as checkpoint tensors on the host, bucket by bucket, in Hugging Face names."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.parameters import flatten
from jaxrl_ppo.models.tensor_plan import TensorEntry, tensor_plan

LAYERS = "layers."


def export_buckets(
    config: DecoderConfig, params: Mapping[str, Any], dtype: Any, bucket_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """Every checkpoint tensor of `params` (nested dict of arrays, like a Decoder's), cast to `dtype`.

    A LoRA adapter is merged into the tensors that it adds to, in float32.

    Tensors of one layer stay together; a bucket holds about `bucket_bytes`. They are cast, laid out and gathered on the
    devices, a layer at a time, and the next layer is under way while one is copied to the host: no device holds more
    than two gathered layers, the host one bucket. Every process of the program must iterate alike; processes other
    than 0 get empty buckets.
    """
    flat = dict(flatten(params))
    layers: dict[int, list[TensorEntry]] = {}
    single: list[tuple[TensorEntry, ...]] = []
    for entry in tensor_plan(config).values():
        if entry.parameter.startswith(LAYERS):
            layers.setdefault(entry.index[0], []).append(entry)
        else:
            single.append((entry,))
    mine = jax.process_index() == 0
    bucket: dict[str, np.ndarray] = {}
    size = 0
    for names, arrays in _prefetched(_gathered(flat, single, layers, np.dtype(dtype), config.adapter_scale)):
        if mine:
            bucket |= {name: np.asarray(array) for name, array in zip(names, arrays)}
        size += sum(array.nbytes for array in arrays)
        if size >= bucket_bytes:
            yield bucket
            bucket, size = {}, 0
    if size:
        yield bucket


Group = tuple[list[str], list[jax.Array]]


def _gathered(
    flat: dict[str, jax.Array],
    single: list[tuple[TensorEntry, ...]],
    layers: dict[int, list[TensorEntry]],
    dtype: np.dtype,
    scale: float,
) -> Iterator[Group]:
    for entries in single:
        yield _gather(flat, entries, None, dtype, scale)
    for layer, members in sorted(layers.items()):
        yield _gather(flat, tuple(members), layer, dtype, scale)


def _gather(
    flat: dict[str, jax.Array], entries: tuple[TensorEntry, ...], layer: int | None, dtype: np.dtype, scale: float
) -> Group:
    needed = {entry.parameter: flat[entry.parameter] for entry in entries}
    for parameter in list(needed):
        needed |= {factor: flat[factor] for factor in _factors(parameter) if factor in flat}
    sharding = next(iter(needed.values())).sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    # What a layer's tensors have in common: with the layer's number an argument, one program serves all layers.
    layout = tuple(
        (e.parameter, e.index[1:] if layer is not None else e.index, e.block_shape, e.layout) for e in entries
    )
    arrays = _program(layout, layer is not None, dtype, scale, everywhere)(needed, layer or 0)
    for array in arrays:
        array.copy_to_host_async()
    return [entry.name for entry in entries], arrays


def _factors(parameter: str) -> tuple[str, ...]:
    """The parameters of a LoRA adapter of a kernel; none of anything else."""
    stem = parameter.removesuffix(".kernel")
    return () if stem == parameter else (f"{stem}.lora_a", f"{stem}.lora_b")


@functools.lru_cache(maxsize=32)
def _program(layout: tuple[Any, ...], layered: bool, dtype: np.dtype, scale: float, sharding: Any) -> Any:
    def gather(params: dict[str, jax.Array], layer: jax.Array) -> list[jax.Array]:
        if layered:
            params = {k: jax.lax.dynamic_index_in_dim(v, layer, keepdims=False) for k, v in params.items()}
        tensors = []
        for parameter, index, block_shape, axes in layout:
            array = params[parameter]
            if factors := [params[factor] for factor in _factors(parameter) if factor in params]:
                first, second = factors
                product = jnp.tensordot(first, second, 1, preferred_element_type=jnp.float32)
                array = array.astype(jnp.float32) + scale * product
            entry = TensorEntry("", parameter, index, block_shape, axes)
            tensors.append(entry.to_tensor(array[index].astype(dtype)))
        return tensors

    return jax.jit(gather, out_shardings=sharding)


def _prefetched(groups: Iterator[Group]) -> Iterator[Group]:
    """The same, each group started before the one ahead of it is asked for."""
    ahead = next(groups, None)
    while ahead is not None:
        current, ahead = ahead, next(groups, None)
        yield current
