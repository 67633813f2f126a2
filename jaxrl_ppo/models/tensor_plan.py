"""The one table between Hugging Face tensors and the decoder's parameters: names, layers, layouts."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.families import FAMILIES
from jaxrl_ppo.models.parameters import parameter_specs


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """One checkpoint tensor and the block of a parameter that it is.

    `index` selects the block along the parameter's leading axes (layer, expert). `layout` lists, for each dimension
    of the tensor, which axes of the block it merges, in order.
    """

    name: str
    parameter: str
    index: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in the checkpoint."""
        return tuple(math.prod(self.block_shape[axis] for axis in group) for group in self.layout)

    def to_tensor(self, block):
        """The checkpoint tensor of a parameter block (numpy or JAX)."""
        return block.transpose([axis for group in self.layout for axis in group]).reshape(self.shape)

    def to_block(self, tensor):
        """The parameter block of a checkpoint tensor (numpy or JAX)."""
        order = [axis for group in self.layout for axis in group]
        unmerged = tensor.reshape([self.block_shape[axis] for axis in order])
        return unmerged.transpose([order.index(axis) for axis in range(len(order))])


def tensor_plan(config: DecoderConfig) -> dict[str, TensorEntry]:
    """Hugging Face name -> entry, for every tensor of a checkpoint of this configuration, in checkpoint order.

    Raises ValueError when the family's table does not cover every parameter exactly once.
    """
    specs = parameter_specs(config)
    by_layer: list[tuple[tuple[int, ...], TensorEntry]] = []
    covered = set()
    for rule in FAMILIES[config.model_type].tensors:
        spec = specs.get(rule.parameter)
        if spec is None:
            continue
        if rule.parameter in covered:
            raise ValueError(f"{config.model_type}: two rules for parameter {rule.parameter}")
        covered.add(rule.parameter)
        stacked = re.findall(r"{(\w+)}", rule.name)
        if tuple(stacked) != spec.axes[: len(stacked)]:
            raise ValueError(f"{rule.name}: {rule.parameter} does not begin with axes {stacked}")
        axes, block_shape = spec.axes[len(stacked) :], spec.shape[len(stacked) :]
        layout = tuple(tuple(axes.index(axis) for axis in group.split("*")) for group in rule.layout.split())
        for index in np.ndindex(*spec.shape[: len(stacked)]):
            name = rule.name.format(**dict(zip(stacked, index)))
            by_layer.append((index[:1], TensorEntry(name, rule.parameter, index, block_shape, layout)))
    if missing := specs.keys() - covered:
        raise ValueError(f"{config.model_type}: no rule for parameters {sorted(missing)}")
    return _ordered(by_layer)


def _ordered(entries: list[tuple[tuple[int, ...], TensorEntry]]) -> dict[str, TensorEntry]:
    """Embedding, then layer by layer, then the rest: a layer's tensors stay together in files and weight buckets."""
    first = [entry for layer, entry in entries if not layer and entry.parameter.startswith("embed.")]
    layers = [entry for _, entry in sorted((e for e in entries if e[0]), key=lambda e: e[0])]
    last = [entry for layer, entry in entries if not layer and not entry.parameter.startswith("embed.")]
    return {entry.name: entry for entry in (*first, *layers, *last)}
