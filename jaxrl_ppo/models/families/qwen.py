"""Qwen2 and Qwen2.5 (q, k, v biases) and Qwen3 (norms on each query and key head)."""

from __future__ import annotations

from typing import Any

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.families.family import LLAMA_LIKE, Family, read_common


def _refuse_window(raw: dict[str, Any]) -> None:
    if raw.get("use_sliding_window", False):
        raise ValueError("use_sliding_window true is not supported for this family")


def _read_qwen2(raw: dict[str, Any]) -> DecoderConfig:
    _refuse_window(raw)
    return read_common(raw, qkv_bias=True)


def _read_qwen3(raw: dict[str, Any]) -> DecoderConfig:
    _refuse_window(raw)
    bias = raw.get("attention_bias", False)
    return read_common(raw, qk_norm=True, qkv_bias=bias, out_bias=bias)


QWEN2 = Family("qwen2", "Qwen2", _read_qwen2, LLAMA_LIKE)
QWEN3 = Family("qwen3", "Qwen3", _read_qwen3, LLAMA_LIKE)
