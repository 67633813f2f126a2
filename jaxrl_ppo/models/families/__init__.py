"""The known model families, by the `model_type` of their configuration."""

from __future__ import annotations

from jaxrl_ppo.models.families.family import Family
from jaxrl_ppo.models.families.llama import LLAMA
from jaxrl_ppo.models.families.qwen import QWEN2, QWEN3

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3)}
