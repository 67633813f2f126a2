"""Every parameter of a decoder, declared once: path, shape, logical axes, initial values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_ppo.models.architecture import DecoderConfig

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]

_normal = jax.nn.initializers.normal(0.02)
_ones = jax.nn.initializers.ones
_zeros = jax.nn.initializers.zeros


# Kernels that may have a LoRA adapter, with the axes of what they take and of what they give.
ADAPTABLE = {
    "attention.q": ("embed", "heads head_dim"),
    "attention.k": ("embed", "kv_heads head_dim"),
    "attention.v": ("embed", "kv_heads head_dim"),
    "attention.o": ("heads head_dim", "embed"),
    "mlp.gate": ("embed", "mlp"),
    "mlp.up": ("embed", "mlp"),
    "mlp.down": ("mlp", "embed"),
}


def _uniform(bound: float) -> Initializer:
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter's shape, the logical name of each axis, and how it is initialised."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    initializer: Initializer


def parameter_specs(config: DecoderConfig) -> dict[str, ParameterSpec]:
    """Dotted path -> declaration, in checkpoint order. Parameters under `layers.` are stacked: axis 0 is the layer."""
    sizes = {
        "layers": config.num_layers,
        "vocab": config.vocab_size,
        "embed": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "mlp": config.intermediate_size,
        "labels": 1,
        "expert": config.num_experts,
        "rank": config.lora.rank if config.lora else 0,
    }

    def spec(axes: str, initializer: Initializer = _normal) -> ParameterSpec:
        names = tuple(axes.split())
        return ParameterSpec(tuple(sizes[name] for name in names), names, initializer)

    norm = _zeros if config.norm_plus_one else _ones
    expert = "expert " if config.num_experts else ""
    specs = {
        "embed.embedding": spec("vocab embed"),
        "layers.attention_norm.scale": spec("layers embed", norm),
        "layers.attention.q.kernel": spec("layers embed heads head_dim"),
        "layers.attention.k.kernel": spec("layers embed kv_heads head_dim"),
        "layers.attention.v.kernel": spec("layers embed kv_heads head_dim"),
        "layers.attention.o.kernel": spec("layers heads head_dim embed"),
        "layers.mlp_norm.scale": spec("layers embed", norm),
        "layers.mlp.gate.kernel": spec(f"layers {expert}embed mlp"),
        "layers.mlp.up.kernel": spec(f"layers {expert}embed mlp"),
        "layers.mlp.down.kernel": spec(f"layers {expert}mlp embed"),
        "final_norm.scale": spec("embed", norm),
    }
    if config.num_experts:
        specs["layers.mlp.router.kernel"] = spec("layers embed expert")
    if config.post_norms:
        specs["layers.attention_post_norm.scale"] = spec("layers embed", norm)
        specs["layers.mlp_post_norm.scale"] = spec("layers embed", norm)
    if config.qkv_bias:
        specs["layers.attention.q.bias"] = spec("layers heads head_dim", _zeros)
        specs["layers.attention.k.bias"] = spec("layers kv_heads head_dim", _zeros)
        specs["layers.attention.v.bias"] = spec("layers kv_heads head_dim", _zeros)
    if config.out_bias:
        specs["layers.attention.o.bias"] = spec("layers embed", _zeros)
    if config.mlp_bias:
        specs["layers.mlp.gate.bias"] = spec("layers mlp", _zeros)
        specs["layers.mlp.up.bias"] = spec("layers mlp", _zeros)
        specs["layers.mlp.down.bias"] = spec("layers embed", _zeros)
    if config.qk_norm:
        specs["layers.attention.q_norm.scale"] = spec("layers head_dim", norm)
        specs["layers.attention.k_norm.scale"] = spec("layers head_dim", norm)
    if config.head != "lm":
        # Small, so that values begin near 0 whatever the size of the hidden states, so a critic unlearns no noise.
        specs["score.kernel"] = spec("embed labels", jax.nn.initializers.normal(1 / (config.hidden_size + 1)))
        if config.head_bias:
            specs["score.bias"] = spec("labels", _zeros)
    elif not config.tie_embeddings:
        specs["lm_head.kernel"] = spec("embed vocab")
    for target in config.lora.targets if config.lora else ():
        inputs, outputs = ADAPTABLE[target]
        # As PEFT begins: the first factor uniform, the second 0, so that the adapter adds nothing yet.
        bound = math.prod(sizes[axis] for axis in inputs.split()) ** -0.5
        specs[f"layers.{target}.lora_a"] = spec(f"layers {inputs} rank", _uniform(bound))
        specs[f"layers.{target}.lora_b"] = spec(f"layers rank {outputs}", _zeros)
    return specs


def is_adapter(path: str) -> bool:
    """Whether a parameter belongs to a LoRA adapter."""
    return path.endswith((".lora_a", ".lora_b"))


def multiplied_parameters(config: DecoderConfig) -> int:
    """How many parameters a token is multiplied with: not the embedding that it looks up, of experts only its own."""
    total = 0
    for path, spec in parameter_specs(config).items():
        size = math.prod(spec.shape)
        if spec.axes[:2] == ("layers", "expert"):
            size = size * config.experts_per_token // config.num_experts
        if path != "embed.embedding" or (config.tie_embeddings and config.head == "lm"):
            total += size
    return total


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every leaf of a nested mapping (a dict or an nnx.State)."""
    for key, value in tree.items():
        if hasattr(value, "items"):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def to_state(flat: dict[str, Any], config: DecoderConfig) -> nnx.State:
    """An nnx.State with the structure of a `Decoder`'s parameters, holding `flat`'s values (any leaves)."""
    specs = parameter_specs(config)
    return nnx.State(nest({path: nnx.Param(value, logical_axes=specs[path].axes) for path, value in flat.items()}))


def abstract_params(config: DecoderConfig, dtype: Any = jnp.float32) -> nnx.State:
    """Shapes and dtypes of a decoder's parameters, nothing allocated: nnx.State of nnx.Param of ShapeDtypeStruct."""
    specs = parameter_specs(config)
    return to_state({path: jax.ShapeDtypeStruct(spec.shape, dtype) for path, spec in specs.items()}, config)


def logical_axes(config: DecoderConfig) -> dict[str, Any]:
    """The nested dict of a decoder's parameters with, at each leaf, the tuple of its axes' logical names."""
    return nest({path: spec.axes for path, spec in parameter_specs(config).items()})
