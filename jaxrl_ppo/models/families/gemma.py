"""Gemma 2 (soft caps, alternating windows) and Gemma 3's text models (q and k norms, another rope in the windows)."""

from __future__ import annotations

from typing import Any

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.families.family import (
    LLAMA_LIKE,
    Family,
    TensorRule,
    layer_rule,
    make_rope,
    read_common,
    read_sliding,
)


def _read(raw: dict[str, Any], period: int, **overrides: Any) -> DecoderConfig:
    """What both have in common; a key that a folder leaves out has transformers' default.

    Every `period`-th layer sees everything, unless `layer_types` says otherwise.
    """
    if raw.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported: generation needs causal attention")
    layers = range(1, raw["num_hidden_layers"] + 1)
    bias = raw.get("attention_bias", False)
    fields: dict[str, Any] = {
        "head_dim": raw.get("head_dim", 256),
        "window": raw.get("sliding_window", 4096),
        "sliding": read_sliding(raw, ["sliding_attention" if i % period else "full_attention" for i in layers]),
        "tie_embeddings": raw.get("tie_word_embeddings", True),
        "attention_scale": raw.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": raw["hidden_size"] ** 0.5,
        "norm_plus_one": True,
        "post_norms": True,
        "qkv_bias": bias,
        "out_bias": bias,
    }
    return read_common(raw, **fields, **overrides)


def _read_gemma2(raw: dict[str, Any]) -> DecoderConfig:
    attention, logits = raw.get("attn_logit_softcapping", 50.0), raw.get("final_logit_softcapping", 30.0)
    return _read(raw, 2, attention_softcap=attention, logit_softcap=logits)


def _read_gemma3(raw: dict[str, Any]) -> DecoderConfig:
    ropes = raw.get("rope_parameters") or {"full_attention": raw.get("rope_scaling")}
    full, local = ropes.get("full_attention") or {}, ropes.get("sliding_attention") or {}
    theta = full.get("rope_theta", raw.get("rope_theta", 1e6))
    local_theta = local.get("rope_theta", raw.get("rope_local_base_freq", 1e4))
    return _read(
        raw,
        raw.get("sliding_window_pattern", 6),
        rope=make_rope(full, float(theta), raw["max_position_embeddings"]),
        local_rope=make_rope(local, float(local_theta), raw["max_position_embeddings"]),
        qk_norm=True,
        attention_softcap=raw.get("attn_logit_softcapping"),
        logit_softcap=raw.get("final_logit_softcapping"),
    )


def _rules() -> tuple[TensorRule, ...]:
    """Llama's, with the norm that Llama has in front of its feed-forward where its name says: behind attention."""
    kept = (rule for rule in LLAMA_LIKE if "post_attention_layernorm" not in rule.name)
    return (
        *kept,
        layer_rule("post_attention_layernorm.weight", "attention_post_norm.scale", "embed"),
        layer_rule("pre_feedforward_layernorm.weight", "mlp_norm.scale", "embed"),
        layer_rule("post_feedforward_layernorm.weight", "mlp_post_norm.scale", "embed"),
    )


GEMMA2 = Family("gemma2", "Gemma2", _read_gemma2, _rules())
GEMMA3 = Family("gemma3_text", "Gemma3Text", _read_gemma3, _rules(), token_classifier=False)
