"""Llama 2, 3 and 3.x, SmolLM2 and others that call themselves `llama`."""

from __future__ import annotations

from typing import Any

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.families.family import LLAMA_LIKE, Family, read_common


def _read(raw: dict[str, Any]) -> DecoderConfig:
    bias = raw.get("attention_bias", False)
    return read_common(raw, qkv_bias=bias, out_bias=bias, mlp_bias=raw.get("mlp_bias", False))


LLAMA = Family("llama", "Llama", _read, LLAMA_LIKE)
