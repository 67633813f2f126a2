"""The oracle of the training tests: a tiny transformers model, and what torch makes of a batch with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from training_cases import TEMPERATURE, VOCABULARY

from jaxrl_ppo.models.tensor_plan import tensor_plan
from jaxrl_ppo.schema.records import Batch


def save_tiny_model(folder: Path, tied: bool = True) -> Path:
    """A random Llama of two layers; heads, vocabulary and widths divide by 8 for the sharded tests."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        eos_token_id=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def torch_log_probs(model: torch.nn.Module, batch: Batch, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [T] of one sample's response, computed alone and unpadded, by transformers."""
    prompt = list(batch.prompts[batch.group[sample]].token_ids)
    response = batch.response_ids[sample].tolist()
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float() / TEMPERATURE
    log_probs = torch.log_softmax(logits, -1)
    chosen = log_probs.gather(-1, torch.tensor(response)[:, None])[:, 0]
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


def torch_gradients(model: torch.nn.Module, config) -> dict[str, np.ndarray]:
    """The gradients in a transformers model, laid out as the decoder's parameters: dotted path -> array."""
    plan = tensor_plan(config)
    named = dict(model.named_parameters())
    out: dict[str, dict[tuple[int, ...], np.ndarray]] = {}
    for name, entry in plan.items():
        out.setdefault(entry.parameter, {})[entry.index] = entry.to_block(named[name].grad.numpy())
    stack = lambda blocks: blocks[()] if () in blocks else np.stack([blocks[k] for k in sorted(blocks)])  # noqa: E731
    return {path: stack(blocks) for path, blocks in out.items()}
