"""The known model families, by the `model_type` of their configuration."""

from __future__ import annotations

from jaxrl_ppo.models.families.family import Family
from jaxrl_ppo.models.families.gemma import GEMMA2, GEMMA3
from jaxrl_ppo.models.families.llama import LLAMA
from jaxrl_ppo.models.families.mistral import MISTRAL, MIXTRAL
from jaxrl_ppo.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3)
}
