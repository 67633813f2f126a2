"""Tiny models, batches and trainers for the training tests, and what torch makes of the same batch."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import torch
import transformers

from jaxrl_ppo.models.parameters import flatten
from jaxrl_ppo.models.tensor_plan import tensor_plan
from jaxrl_ppo.schema.config import ActorRolloutRefConfig, AlgorithmConfig
from jaxrl_ppo.schema.records import Batch, Prompt
from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.training.policy import PolicyTrainer

VOCABULARY = 96
TEMPERATURE = 0.8


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


def make_config(**actor) -> ActorRolloutRefConfig:
    """Float32, temperature 0.8, 64 tokens a micro-step; `actor` sets keys of `actor`, `optim__lr` for nested ones."""
    config = ActorRolloutRefConfig()
    config.model.enable_gradient_checkpointing = False
    config.rollout.temperature = TEMPERATURE
    config.rollout.response_length = 12
    config.actor.fsdp_config.dtype = "float32"
    config.actor.ppo_max_token_len_per_gpu = 64
    config.actor.log_prob_chunk_size = 16
    config.actor.optim.lr = 1e-2
    for key, value in actor.items():
        section, *inner = key.split("__")
        target = getattr(config.actor, section) if inner else config.actor
        setattr(target, inner[0] if inner else section, value)
    return config


def make_trainer(folder: Path, config: ActorRolloutRefConfig | None = None, **arguments) -> PolicyTrainer:
    """A trainer on all of this process's devices."""
    config = config or make_config()
    defaults = {"total_steps": 10, "needs_reference": False, "seed": 42}
    return PolicyTrainer(
        config, AlgorithmConfig(), model_folder=folder, mesh=make_mesh(config.actor.mesh), **(defaults | arguments)
    )


def make_batch(seed: int = 0, prompts: int = 4, samples: int = 3, longest: int = 10, holes: bool = True) -> Batch:
    """Random samples: ragged prompts and responses, holes in masks, one empty response, NaN where nothing counts."""
    rng = np.random.default_rng(seed)
    size, length = prompts * samples, longest + 2
    records = [
        Prompt(100 + i, tuple(int(t) for t in rng.integers(3, VOCABULARY, rng.integers(1, 9))), [], "", None, {})
        for i in range(prompts)
    ]
    lengths = rng.integers(1, longest + 1, size)
    lengths[-1] = 0
    mask = (np.arange(length) < lengths[:, None]).astype(np.float32)
    if holes:
        mask[rng.random(mask.shape) < 0.15] = 0
    nan = np.where(mask > 0, 0, np.nan).astype(np.float32)
    draw = lambda scale: (rng.normal(size=mask.shape) * scale).astype(np.float32)  # noqa: E731
    return Batch(
        prompts=records,
        group=np.repeat(np.arange(prompts), samples).astype(np.int32),
        response_ids=rng.integers(3, VOCABULARY, mask.shape).astype(np.int32),
        response_mask=mask,
        rollout_log_probs=draw(0.3) - 4 + nan,
        versions=np.zeros(mask.shape, np.int32),
        scores=rng.normal(size=size).astype(np.float32),
        old_log_probs=draw(0.3) - 4 + nan,
        ref_log_probs=draw(0.3) - 4 + nan,
        advantages=draw(1) + nan,
        importance_weights=np.exp(draw(0.2)) + nan,
    )


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


def arrays(tree) -> dict[str, np.ndarray]:
    """Dotted path -> numpy array of a nested dict of (fully addressable) arrays."""
    return {path: np.asarray(leaf) for path, leaf in flatten(tree)}


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
    """Every array equal to `tolerance`, relative to the array's largest value."""
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(
            actual[path], value, rtol=0, atol=tolerance * max(np.abs(value).max(), 1e-3), err_msg=path
        )


def copy(tree):
    """A copy that a donated buffer cannot take along."""
    return jax.tree.map(np.array, tree)
