"""Configurations, batches and trainers of the training tests; imports nothing that is slow to import."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from jaxrl_ppo.models.parameters import flatten
from jaxrl_ppo.schema.config import ActorRolloutRefConfig, AlgorithmConfig, CriticConfig
from jaxrl_ppo.schema.records import Batch, Prompt
from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.training.critic import CriticTrainer
from jaxrl_ppo.training.policy import PolicyTrainer

VOCABULARY = 96
TEMPERATURE = 0.8
CLIPRANGE_VALUE = 0.3


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
    """A trainer, on all of this process's devices unless a mesh is given."""
    config = config or make_config()
    defaults = {"algorithm": AlgorithmConfig(), "total_steps": 10, "needs_reference": False, "seed": 42}
    if "mesh" not in arguments:
        arguments["mesh"] = make_mesh(config.actor.mesh)
    return PolicyTrainer(config, model_folder=folder, **(defaults | arguments))


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


def make_critic(folder: Path, tokens: int = 512, mesh: jax.sharding.Mesh | None = None, **settings) -> CriticTrainer:
    """A critic, on one device unless a mesh is given; `settings` sets keys of `critic`, `optim__lr` for nested ones."""
    critic = CriticConfig(cliprange_value=CLIPRANGE_VALUE, ppo_max_token_len_per_gpu=tokens)
    critic.optim.lr = 1e-2
    for key, value in settings.items():
        section, _, inner = key.partition("__")
        setattr(getattr(critic, section) if inner else critic, inner or section, value)
    policy = make_config(shuffle=True)
    mesh = mesh or make_mesh(policy.actor.mesh)
    return CriticTrainer(critic, policy, model_folder=folder, mesh=mesh, total_steps=10, seed=42)


def with_returns(batch, values):
    """Old values and returns around `values`, some outside the clip range; NaN where nothing counts."""
    rng = np.random.default_rng(3)
    nan = np.where(batch.response_mask > 0, 0, np.nan)
    batch.values = (values + rng.normal(0, CLIPRANGE_VALUE, values.shape) + nan).astype(np.float32)
    batch.returns = (values + rng.normal(0, 1, values.shape) + nan).astype(np.float32)
    return batch


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
