"""Mistral (a sliding window in its first version) and Mixtral (routed experts)."""

from __future__ import annotations

from typing import Any

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.families.family import LLAMA_LIKE, Family, expert_rules, read_common, read_experts


def _read_mistral(raw: dict[str, Any]) -> DecoderConfig:
    return read_common(raw, window=raw.get("sliding_window", 4096))  # transformers' default


def _read_mixtral(raw: dict[str, Any]) -> DecoderConfig:
    if raw.get("router_jitter_noise"):
        raise ValueError("router_jitter_noise is not supported: set it to 0")
    return read_common(raw, window=raw.get("sliding_window"), **read_experts(raw))


MISTRAL = Family("mistral", "Mistral", _read_mistral, LLAMA_LIKE)
MIXTRAL = Family("mixtral", "Mixtral", _read_mixtral, expert_rules("block_sparse_moe", gate="w1", up="w3", down="w2"))
