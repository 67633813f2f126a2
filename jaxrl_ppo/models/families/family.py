"""What a family states about itself, and the parts of a Hugging Face configuration that most families share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxrl_ppo.models.architecture import ACTIVATIONS, DecoderConfig, RopeConfig


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRule:
    """One checkpoint tensor: its Hugging Face name, the parameter it becomes, and its layout in axis names.

    In `name`, `{layers}` (and `{expert}`) stand for an index along the parameter's axis of that name. `layout` lists
    the tensor's dimensions by the parameter's axis names; `heads*head_dim` is one dimension made of both.
    Rules whose parameter a configuration does not have (a bias, an untied head) do not apply.
    """

    name: str
    parameter: str
    layout: str


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A `model_type`: how its configuration reads, how its checkpoint is laid out, and what transformers calls it.

    `name` begins the names of its classes with a classification head. Without `token_classifier` transformers has none
    for tokens, and a value head, then without a bias, is kept as a sequence classifier.
    """

    model_type: str
    name: str
    read: Callable[[dict[str, Any]], DecoderConfig]
    tensors: tuple[TensorRule, ...]
    token_classifier: bool = True

    def classifier(self, head: str) -> str:
        """The class of transformers that opens a folder with the head "value" or "sequence"."""
        kind = "Token" if head == "value" and self.token_classifier else "Sequence"
        return f"{self.name}For{kind}Classification"


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A Hugging Face token id field, which may be null, one id or a list, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def read_rope(raw: dict[str, Any]) -> RopeConfig:
    """Rope of a configuration in either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    Raises ValueError for a rope type that is not implemented.
    """
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    return make_rope(rope, theta, raw["max_position_embeddings"])


def make_rope(rope: dict[str, Any], theta: float, max_positions: int) -> RopeConfig:
    """Rope of base `theta` from the entries that stretch it, in Hugging Face's names.

    Raises ValueError for a rope type that is not implemented.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported: these models rotate whole heads")
    if kind == "default":
        return RopeConfig(theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(theta, kind, factor=float(rope["factor"]))
    if kind == "yarn":
        return RopeConfig(
            theta,
            kind,
            factor=float(rope["factor"]),
            original_max_positions=int(rope.get("original_max_position_embeddings") or max_positions),
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=_yarn_attention_factor(rope),
        )
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            factor=float(rope["factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
        )
    raise ValueError(f"rope type {kind!r} is not supported; known: default, linear, dynamic, yarn, llama3")


def _yarn_attention_factor(rope: dict[str, Any]) -> float:
    """YaRN's factor on cos and sin where the configuration does not give it (arXiv:2309.00071, equation 22)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def read_common(raw: dict[str, Any], **overrides: Any) -> DecoderConfig:
    """The fields that Llama-like families spell alike; `overrides` are a family's own.

    Raises KeyError for a missing key and ValueError for a value that is not supported.
    """
    activation = raw.get("hidden_activation") or raw.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    num_heads = raw["num_attention_heads"]
    fields: dict[str, Any] = {
        "model_type": raw["model_type"],
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": raw.get("num_key_value_heads") or num_heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // num_heads,
        "max_positions": raw["max_position_embeddings"],
        "norm_eps": raw["rms_norm_eps"],
        "rope": overrides.get("rope") or read_rope(raw),
        "activation": activation,
        "tie_embeddings": raw.get("tie_word_embeddings", False),
        "eos_token_ids": token_ids(raw.get("eos_token_id")),
        "bos_token_id": raw.get("bos_token_id"),
        "pad_token_id": raw.get("pad_token_id"),
    }
    return DecoderConfig(**{**fields, **overrides})


def read_sliding(raw: dict[str, Any], default: list[str]) -> tuple[bool, ...]:
    """Which layers have the sliding window, from `layer_types` or, where that is missing, `default`.

    Raises ValueError for another type of layer.
    """
    types = raw.get("layer_types") or default
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer type {unknown.pop()!r} is not supported; known: full_attention, sliding_attention")
    return tuple(kind == "sliding_attention" for kind in types)


def read_experts(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of a mixture of experts.

    The load-balance loss is part of the training loss where transformers makes it so: with `output_router_logits`.
    """
    coefficient = raw.get("router_aux_loss_coef", 0.001) if raw.get("output_router_logits", False) else 0.0
    return {
        "num_experts": raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"],
        "experts_per_token": raw["num_experts_per_tok"],
        "balance_coef": coefficient,
    }


def layer_rule(name: str, parameter: str, layout: str) -> TensorRule:
    """The rule of a tensor that every layer has; names without `model.layers.N.` and `layers.`."""
    return TensorRule(f"model.layers.{{layers}}.{name}", f"layers.{parameter}", layout)


LLAMA_LIKE: tuple[TensorRule, ...] = (
    TensorRule("model.embed_tokens.weight", "embed.embedding", "vocab embed"),
    layer_rule("input_layernorm.weight", "attention_norm.scale", "embed"),
    layer_rule("self_attn.q_proj.weight", "attention.q.kernel", "heads*head_dim embed"),
    layer_rule("self_attn.q_proj.bias", "attention.q.bias", "heads*head_dim"),
    layer_rule("self_attn.k_proj.weight", "attention.k.kernel", "kv_heads*head_dim embed"),
    layer_rule("self_attn.k_proj.bias", "attention.k.bias", "kv_heads*head_dim"),
    layer_rule("self_attn.v_proj.weight", "attention.v.kernel", "kv_heads*head_dim embed"),
    layer_rule("self_attn.v_proj.bias", "attention.v.bias", "kv_heads*head_dim"),
    layer_rule("self_attn.q_norm.weight", "attention.q_norm.scale", "head_dim"),
    layer_rule("self_attn.k_norm.weight", "attention.k_norm.scale", "head_dim"),
    layer_rule("self_attn.o_proj.weight", "attention.o.kernel", "embed heads*head_dim"),
    layer_rule("self_attn.o_proj.bias", "attention.o.bias", "embed"),
    layer_rule("post_attention_layernorm.weight", "mlp_norm.scale", "embed"),
    layer_rule("mlp.gate_proj.weight", "mlp.gate.kernel", "mlp embed"),
    layer_rule("mlp.gate_proj.bias", "mlp.gate.bias", "mlp"),
    layer_rule("mlp.up_proj.weight", "mlp.up.kernel", "mlp embed"),
    layer_rule("mlp.up_proj.bias", "mlp.up.bias", "mlp"),
    layer_rule("mlp.down_proj.weight", "mlp.down.kernel", "embed mlp"),
    layer_rule("mlp.down_proj.bias", "mlp.down.bias", "embed"),
    TensorRule("model.norm.weight", "final_norm.scale", "embed"),
    TensorRule("lm_head.weight", "lm_head.kernel", "vocab embed"),
    TensorRule("score.weight", "score.kernel", "labels embed"),
    TensorRule("score.bias", "score.bias", "labels"),
)


def expert_rules(block: str, *, gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    """LLAMA_LIKE with experts, and the router of `block`, in place of the feed-forward, by their names there."""
    kept = tuple(rule for rule in LLAMA_LIKE if not rule.parameter.startswith("layers.mlp."))
    return (
        *kept,
        layer_rule(f"{block}.gate.weight", "mlp.router.kernel", "expert embed"),
        layer_rule(f"{block}.experts.{{expert}}.{gate}.weight", "mlp.gate.kernel", "mlp embed"),
        layer_rule(f"{block}.experts.{{expert}}.{up}.weight", "mlp.up.kernel", "mlp embed"),
        layer_rule(f"{block}.experts.{{expert}}.{down}.weight", "mlp.down.kernel", "embed mlp"),
    )
