"""Qwen2 and Qwen2.5 (q, k, v biases), Qwen3 (norms on each query and key head) and Qwen3-MoE (routed experts)."""

from __future__ import annotations

from typing import Any

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.families.family import LLAMA_LIKE, Family, expert_rules, read_common, read_experts, read_sliding


def _read_window(raw: dict[str, Any]) -> dict[str, Any]:
    """These models have a window that is mostly switched off; where it is on, it is so from some layer onwards."""
    if not raw.get("use_sliding_window", False) or raw["sliding_window"] is None:
        return {}
    first, layers = raw.get("max_window_layers", 28), raw["num_hidden_layers"]
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return {"window": raw["sliding_window"], "sliding": read_sliding(raw, default)}


def _read_qwen2(raw: dict[str, Any]) -> DecoderConfig:
    return read_common(raw, qkv_bias=True, **_read_window(raw))


def _read_qwen3(raw: dict[str, Any]) -> DecoderConfig:
    bias = raw.get("attention_bias", False)
    return read_common(raw, qk_norm=True, qkv_bias=bias, out_bias=bias, **_read_window(raw))


def _read_qwen3_moe(raw: dict[str, Any]) -> DecoderConfig:
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            "layers without experts are not supported: mlp_only_layers must be empty, decoder_sparse_step 1"
        )
    bias = raw.get("attention_bias", False)
    window = {"window": raw["sliding_window"]} if raw.get("use_sliding_window", False) else {}
    return read_common(
        raw,
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        intermediate_size=raw["moe_intermediate_size"],
        normalise_experts=raw.get("norm_topk_prob", False),
        **read_experts(raw),
        **window,
    )


QWEN2 = Family("qwen2", "Qwen2", _read_qwen2, LLAMA_LIKE)
QWEN3 = Family("qwen3", "Qwen3", _read_qwen3, LLAMA_LIKE)
QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3Moe", _read_qwen3_moe, expert_rules("mlp", gate="gate_proj", up="up_proj", down="down_proj")
)
