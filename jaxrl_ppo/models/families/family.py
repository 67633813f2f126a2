"""What a family states about itself, and the parts of a Hugging Face configuration that most families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxrl_ppo.models.architecture import DecoderConfig, RopeConfig


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
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            factor=float(rope["factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
        )
    raise ValueError(f"rope type {kind!r} is not supported; known: default, linear, llama3")


def read_common(raw: dict[str, Any], **overrides: Any) -> DecoderConfig:
    """The fields that Llama-like families spell alike; `overrides` are a family's own.

    Raises KeyError for a missing key and ValueError for a value that is not supported.
    """
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported for {raw['model_type']}; known: silu")
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
        "rope": read_rope(raw),
        "tie_embeddings": raw.get("tie_word_embeddings", False),
        "eos_token_ids": token_ids(raw.get("eos_token_id")),
        "bos_token_id": raw.get("bos_token_id"),
        "pad_token_id": raw.get("pad_token_id"),
    }
    return DecoderConfig(**{**fields, **overrides})


def _layer(name: str, parameter: str, layout: str) -> TensorRule:
    return TensorRule(f"model.layers.{{layers}}.{name}", f"layers.{parameter}", layout)


LLAMA_LIKE: tuple[TensorRule, ...] = (
    TensorRule("model.embed_tokens.weight", "embed.embedding", "vocab embed"),
    _layer("input_layernorm.weight", "attention_norm.scale", "embed"),
    _layer("self_attn.q_proj.weight", "attention.q.kernel", "heads*head_dim embed"),
    _layer("self_attn.q_proj.bias", "attention.q.bias", "heads*head_dim"),
    _layer("self_attn.k_proj.weight", "attention.k.kernel", "kv_heads*head_dim embed"),
    _layer("self_attn.k_proj.bias", "attention.k.bias", "kv_heads*head_dim"),
    _layer("self_attn.v_proj.weight", "attention.v.kernel", "kv_heads*head_dim embed"),
    _layer("self_attn.v_proj.bias", "attention.v.bias", "kv_heads*head_dim"),
    _layer("self_attn.q_norm.weight", "attention.q_norm.scale", "head_dim"),
    _layer("self_attn.k_norm.weight", "attention.k_norm.scale", "head_dim"),
    _layer("self_attn.o_proj.weight", "attention.o.kernel", "embed heads*head_dim"),
    _layer("self_attn.o_proj.bias", "attention.o.bias", "embed"),
    _layer("post_attention_layernorm.weight", "mlp_norm.scale", "embed"),
    _layer("mlp.gate_proj.weight", "mlp.gate.kernel", "mlp embed"),
    _layer("mlp.gate_proj.bias", "mlp.gate.bias", "mlp"),
    _layer("mlp.up_proj.weight", "mlp.up.kernel", "mlp embed"),
    _layer("mlp.up_proj.bias", "mlp.up.bias", "mlp"),
    _layer("mlp.down_proj.weight", "mlp.down.kernel", "embed mlp"),
    _layer("mlp.down_proj.bias", "mlp.down.bias", "embed"),
    TensorRule("model.norm.weight", "final_norm.scale", "embed"),
    TensorRule("lm_head.weight", "lm_head.kernel", "vocab embed"),
    TensorRule("score.weight", "score.kernel", "labels embed"),
    TensorRule("score.bias", "score.bias", "labels"),
)
