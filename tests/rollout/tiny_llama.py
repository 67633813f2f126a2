"""A tiny Llama with random weights, as a Hugging Face folder and in transformers: the oracle of the engine tests."""

import dataclasses
from pathlib import Path

import numpy as np

PROMPT = (1, 17, 33, 200, 9, 451, 77)  # the first model's greedy answer to it ends with an end token


@dataclasses.dataclass
class Checkpoint:
    """A Hugging Face folder and the same model in transformers, float32."""

    folder: Path
    model: object

    def tensors(self):
        """Hugging Face name -> array, without the tied output projection."""
        state = self.model.state_dict()
        return {name: tensor.numpy().copy() for name, tensor in state.items() if name != "lm_head.weight"}

    def log_softmax(self, token_ids):
        """Log-probs [len, vocabulary] of the next token at every position, float64."""
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([list(token_ids)])).logits[0]
        return logits.double().log_softmax(-1).numpy()

    def greedy(self, prompt, count):
        """The `count` likeliest tokens one after another, end tokens or not."""
        import torch

        with torch.no_grad():
            output = self.model.generate(
                torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False, eos_token_id=10**6
            )
        return output[0, len(prompt) :].numpy()


def make_checkpoint(folder, seed, end_tokens=None):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    checkpoint = Checkpoint(Path(folder), LlamaForCausalLM(config).eval())
    if end_tokens is None:
        end_tokens = [2, int(checkpoint.greedy(PROMPT, 12)[-1])]
    checkpoint.model.generation_config.eos_token_id = end_tokens
    checkpoint.model.save_pretrained(folder)
    return checkpoint


def processed_log_prob(log_softmax, token, temperature=1.0, top_k=-1, top_p=1.0):
    """Log-prob of `token` after temperature, top-k and top-p, from log-probs [vocabulary] at temperature 1."""
    scaled = log_softmax / temperature
    scaled = scaled - np.logaddexp.reduce(scaled)
    order = np.argsort(-scaled)
    keep = np.ones(len(scaled), bool)
    if top_k > 0:
        keep[order[top_k:]] = False
    if top_p < 1:
        kept = np.where(keep, np.exp(scaled), 0)
        kept /= kept.sum()
        before = np.cumsum(kept[order]) - kept[order]
        keep[order[before >= top_p]] = False
    assert keep[token]
    return scaled[token] - np.logaddexp.reduce(scaled[keep])
