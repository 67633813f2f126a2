"""The one table between Hugging Face tensors and the decoder's parameters: names, layers, layouts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.families import FAMILIES
from jaxrl_ppo.models.families.family import TensorRule
from jaxrl_ppo.models.parameters import ParameterSpec, is_adapter, parameter_specs


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
    specs = {path: spec for path, spec in parameter_specs(config).items() if not is_adapter(path)}
    return _plan(config.model_type, FAMILIES[config.model_type].tensors, specs)


def adapter_plan(config: DecoderConfig) -> dict[str, TensorEntry]:
    """The same for the LoRA adapter of a configuration that has one, in PEFT's names and layouts."""
    specs = {path: spec for path, spec in parameter_specs(config).items() if is_adapter(path)}
    rules = []
    for rule in FAMILIES[config.model_type].tensors:
        kernel = rule.parameter.removesuffix(".kernel")
        if f"{kernel}.lora_a" not in specs or rule.parameter == kernel:
            continue
        stem, (outputs, inputs) = rule.name.removesuffix(".weight"), rule.layout.split()
        rules.append(TensorRule(f"base_model.model.{stem}.lora_A.weight", f"{kernel}.lora_a", f"rank {inputs}"))
        rules.append(TensorRule(f"base_model.model.{stem}.lora_B.weight", f"{kernel}.lora_b", f"{outputs} rank"))
    return _plan(config.model_type, rules, specs)


def _plan(model_type: str, rules: Sequence[TensorRule], specs: Mapping[str, ParameterSpec]) -> dict[str, TensorEntry]:
    by_layer: list[tuple[tuple[int, ...], TensorEntry]] = []
    covered = set()
    for rule in rules:
        spec = specs.get(rule.parameter)
        if spec is None:
            continue
        if rule.parameter in covered:
            raise ValueError(f"{model_type}: two rules for parameter {rule.parameter}")
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
        raise ValueError(f"{model_type}: no rule for parameters {sorted(missing)}")
    return _ordered(by_layer)


def _ordered(entries: list[tuple[tuple[int, ...], TensorEntry]]) -> dict[str, TensorEntry]:
    """Embedding, then layer by layer, then the rest: a layer's tensors stay together in files and weight buckets."""
    first = [entry for layer, entry in entries if not layer and entry.parameter.startswith("embed.")]
    layers = [entry for _, entry in sorted((e for e in entries if e[0]), key=lambda e: e[0])]
    last = [entry for layer, entry in entries if not layer and not entry.parameter.startswith("embed.")]
    return {entry.name: entry for entry in (*first, *layers, *last)}
