"""What rollout correction is worth when samples are four weight versions old: a small model, several seeds.

A decoder of one layer learns to answer each of eight prompts with three tokens of its own. Each batch is
drawn with the weights of `--staleness` updates ago. Printed per setting: the mean reward of the last fifth of the
updates, as mean and spread over the seeds.

Usage: python benchmarks/staleness.py [--staleness 4] [--updates 120] [--seeds 5] [--lr 0.01]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from jaxrl_ppo.models.decoder import Decoder
from jaxrl_ppo.models.parameters import flatten, to_state
from jaxrl_ppo.pipeline.estimation import Estimation
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.records import Batch, Prompt
from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.training.policy import PolicyTrainer

VOCABULARY, PROMPTS, SAMPLES, LENGTH = 16, 8, 8, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "naive: old log-probs recomputed, no correction": {},
    "token weights, truncated at 2": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "sequence weights, truncated at 2": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "bypass: PPO's clipped ratio to the rollout": {"bypass_mode": True},
}


def save_model(folder: Path, seed: int) -> Path:
    """A random one-layer Llama."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        eos_token_id=0,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_config(correction: dict[str, Any], lr: float) -> Config:
    """GRPO with these settings of rollout correction; one optimizer step a batch."""
    config = Config()
    config.algorithm.adv_estimator = "grpo"
    for name, value in correction.items():
        setattr(config.algorithm.rollout_correction, name, value)
    policy = config.actor_rollout_ref
    policy.model.enable_gradient_checkpointing = False
    policy.rollout.response_length = LENGTH
    policy.actor.calculate_entropy = True  # every sample is computed: one shape, one program
    policy.actor.fsdp_config.dtype = "float32"
    policy.actor.optim.lr, policy.actor.optim.weight_decay = lr, 0.0
    return config


class Sampler:
    """Draws responses with given weights, by whole forward passes: the sequences are short."""

    def __init__(self, model: Any):
        self.model = model
        self.graph = nnx.graphdef(Decoder(model, rngs=nnx.Rngs(0)))
        self.draw = jax.jit(self._draw)

    def _draw(self, params: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Responses and their log-probs, [PROMPTS * SAMPLES, LENGTH]."""
        decoder: Any = nnx.merge(self.graph, to_state(dict(flatten(params)), self.model))
        rows = jnp.repeat(jnp.arange(PROMPTS), SAMPLES) + 1
        tokens = jnp.zeros((len(rows), 1 + LENGTH), jnp.int32).at[:, 0].set(rows)
        positions = jnp.broadcast_to(jnp.arange(1 + LENGTH), tokens.shape)
        chosen = []
        for step in range(LENGTH):
            hidden = decoder.hidden(tokens, positions, jnp.ones_like(tokens))[:, step]
            log_probs = jax.nn.log_softmax((hidden @ decoder.head()).astype(jnp.float32))
            token = jax.random.categorical(jax.random.fold_in(key, step), log_probs)
            chosen.append(jnp.take_along_axis(log_probs, token[:, None], 1)[:, 0])
            tokens = tokens.at[:, step + 1].set(token)
        return tokens[:, 1:], jnp.stack(chosen, axis=1)


def learn(config: Config, folder: Path, *, seed: int, updates: int, staleness: int) -> list[float]:
    """The mean reward of each update's batch."""
    policy = config.actor_rollout_ref
    trainer = PolicyTrainer(
        policy,
        config.algorithm,
        model_folder=folder,
        mesh=make_mesh(policy.actor.mesh),
        total_steps=updates,
        needs_reference=False,
        seed=seed,
    )
    estimation, sampler = Estimation(config), Sampler(trainer.model)
    prompts = [Prompt(i, (i + 1,), [], "", None, {}) for i in range(PROMPTS)]
    group = np.repeat(np.arange(PROMPTS), SAMPLES).astype(np.int32)
    target = np.random.default_rng(seed).integers(1, VOCABULARY, (PROMPTS, LENGTH))[group]
    ones = np.ones((len(group), LENGTH), np.float32)
    versions = [jax.tree.map(jnp.copy, trainer.params)]
    rewards = []
    for update in range(updates):
        responses, log_probs = sampler.draw(versions[0], jax.random.key(seed * 10_000 + update))
        scores = (np.asarray(responses) == target).mean(axis=1).astype(np.float32)
        rewards.append(float(scores.mean()))
        batch = Batch(
            prompts, group, np.asarray(responses), ones, np.asarray(log_probs), np.zeros(ones.shape, np.int32), scores
        )
        bypass = config.algorithm.rollout_correction.bypass_mode
        batch.old_log_probs = batch.rollout_log_probs if bypass else trainer.log_probs(batch)
        estimation.estimate(batch, [])
        trainer.update(batch)
        versions = [*versions, jax.tree.map(jnp.copy, trainer.params)][-(staleness + 1) :]
    return rewards


def report(name: str, curves: list[list[float]]) -> None:
    """One setting's line."""
    last = [statistics.mean(curve[-len(curve) // 5 :]) for curve in curves]
    spread = statistics.stdev(last) if len(last) > 1 else 0.0
    print(f"| {name} | {statistics.mean(last):.3f} | {spread:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.01)
    arguments = parser.parse_args()
    print("| setting | reward at the end | spread |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        run = functools.partial(learn, updates=arguments.updates)
        folders = [save_model(Path(temporary) / str(seed), seed) for seed in range(arguments.seeds)]

        def curves(correction: dict[str, Any], staleness: int) -> list[list[float]]:
            config = make_config(correction, arguments.lr)
            return [run(config, folder, seed=i, staleness=staleness) for i, folder in enumerate(folders)]

        report("no staleness", curves({}, 0))
        for name, correction in SETTINGS.items():
            report(f"{arguments.staleness} versions old, {name}", curves(correction, arguments.staleness))


if __name__ == "__main__":
    main()
