"""Tiny random transformers models of each family: the oracle of the model tests."""

from __future__ import annotations

import torch
import transformers

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": [2, 5],
    "bos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama_tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_bias": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama_linear": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama_llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "qwen2": lambda: transformers.Qwen2Config(**{**SIZES, "head_dim": 8}, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """A random model of family variant `name`; biases and norms random too, so that none can be left out unseen."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.to(dtype).eval()
