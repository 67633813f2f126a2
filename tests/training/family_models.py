"""Tiny random models of the families, as folders; every size divides by 8 for the meshes."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from training_cases import VOCABULARY

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "pad_token_id": None,
}
WINDOW = {"sliding_window": 6}  # prompts and responses here are a little longer
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
# By name: the configuration of a model, from the sizes that all have.
CONFIGS = {
    "llama": lambda sizes: transformers.LlamaConfig(**sizes),
    "mistral": lambda sizes: transformers.MistralConfig(**sizes, **WINDOW),
    "mixtral": lambda sizes: transformers.MixtralConfig(**sizes, **EXPERTS, num_local_experts=4),
    "qwen2": lambda sizes: transformers.Qwen2Config(
        **{name: size for name, size in sizes.items() if name != "head_dim"}, tie_word_embeddings=True
    ),
    "qwen3": lambda sizes: transformers.Qwen3Config(**sizes),
    "qwen3_moe": lambda sizes: transformers.Qwen3MoeConfig(**sizes, **EXPERTS, num_experts=8, moe_intermediate_size=32),
    "gemma2": lambda sizes: transformers.Gemma2Config(
        **sizes, **WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda sizes: transformers.Gemma3TextConfig(
        **sizes, **WINDOW, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
    ),
}


def save_family(name: str, folder: Path, **sizes: int) -> Path:
    """A random model of `name`, its experts and biases too; `sizes` in place of those of SIZES."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](SIZES | sizes))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if any(part in parameter_name for part in ("experts", "mlp.gate.weight", "bias")):
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder
