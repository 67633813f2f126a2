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
WINDOW = 24
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "pad_token_id": None}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama_tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_bias": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama_linear": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR_ROPE),
    "llama_llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama_yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN_ROPE),
    "llama_dynamic": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4),
    "qwen2": lambda: transformers.Qwen2Config(**{**SIZES, "head_dim": 8}, tie_word_embeddings=True),
    "qwen2_window": lambda: transformers.Qwen2Config(
        **{**SIZES, "head_dim": 8}, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_experts=8, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **{**SIZES, **GEMMA}, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**SIZES, **GEMMA},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": LINEAR_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """A random model of family variant `name`; biases and norms random too, so that none can be left out unseen."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter += 0.3 * torch.randn_like(parameter)
            elif "experts" in parameter_name or "mlp.gate.weight" in parameter_name:
                parameter.normal_(std=0.2)
    return model.to(dtype).eval()


def checkpoint_gradients(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """The gradients in a model, named and shaped as its tensors are in a checkpoint."""
    gradients = {}
    for name, parameter in model.named_parameters():
        stem, _, last = name.rpartition(".")
        if model.config.model_type == "mixtral":
            stem = stem.replace(".mlp", ".block_sparse_moe")
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
        if model.config.model_type == "mixtral":
            names = [{"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[n] for n in names]
        for i, part in enumerate(names):
            for expert, gradient in enumerate(parameter.grad.chunk(len(names), dim=1)[i]):
                gradients[f"{stem}.{expert}.{part}.weight"] = gradient
        if not names:
            gradients[f"{stem}.{last}"] = parameter.grad
    return gradients
