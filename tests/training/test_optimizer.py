"""The optimizer step against torch, schedules against transformers, and the step that is skipped."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxrl_ppo.schema.config import OptimConfig
from jaxrl_ppo.training.optimizer import apply_gradients, learning_rate, make_optimizer

SHAPES = {"kernel": (4, 3), "scale": (3,)}
KEY = "actor_rollout_ref.actor.optim"
DECAYED = {"kernel": True, "scale": False}


def tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: (rng.normal(size=shape) * scale).astype(np.float32) for name, shape in SHAPES.items()}


def test_adamw_with_decay_and_clipping_equals_torch():
    config = OptimConfig(lr=0.1, weight_decay=0.3, betas=[0.8, 0.95], clip_grad=0.5)
    optimizer = make_optimizer(config, 10, DECAYED, KEY)
    params = jax.tree.map(jnp.asarray, tree(0))
    state = optimizer.init(params)
    theirs = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in tree(0).items()}
    groups = [
        {"params": [theirs[name]], "weight_decay": config.weight_decay if DECAYED[name] else 0.0} for name in SHAPES
    ]
    torch_optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas))
    for step, scale in enumerate((0.01, 10.0, 1.0)):  # below and above the clipping norm
        grads = tree(step + 1, scale)
        params, state, norm = apply_gradients(optimizer, config.clip_grad, params, state, grads)
        for name, parameter in theirs.items():
            parameter.grad = torch.tensor(grads[name])
        torch_norm = torch.nn.utils.clip_grad_norm_(theirs.values(), config.clip_grad)
        torch_optimizer.step()
        assert float(norm) == pytest.approx(float(torch_norm), rel=1e-6)
        for name, parameter in theirs.items():
            np.testing.assert_allclose(params[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_norm_that_is_not_finite_changes_nothing(bad):
    optimizer = make_optimizer(OptimConfig(lr=0.1), 10, DECAYED, KEY)
    params = jax.tree.map(jnp.asarray, tree(0))
    params, state, _ = apply_gradients(optimizer, 1.0, params, optimizer.init(params), tree(1))
    grads = tree(2)
    grads["kernel"][1, 2] = bad
    new_params, new_state, norm = apply_gradients(optimizer, 1.0, params, state, grads)
    assert not np.isfinite(norm)
    for new, old in zip(jax.tree.leaves((new_params, new_state)), jax.tree.leaves((params, state)), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("constant", lambda o: transformers.get_constant_schedule_with_warmup(o, 4)),
        ("linear", lambda o: transformers.get_linear_schedule_with_warmup(o, 4, 20)),
        ("cosine", lambda o: transformers.get_cosine_schedule_with_warmup(o, 4, 20)),
    ],
)
@pytest.mark.parametrize("by_ratio", [False, True])
def test_schedules_equal_transformers(kind, make, by_ratio):
    warmup = {"lr_warmup_steps_ratio": 0.2} if by_ratio else {"lr_warmup_steps": 4}
    schedule = learning_rate(OptimConfig(lr=0.5, lr_scheduler_type=kind, **warmup), 20)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs = make(optimizer)
    for step in range(20):
        assert float(schedule(step)) == pytest.approx(theirs.get_last_lr()[0], abs=1e-7), step
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear"])
def test_schedules_equal_their_formulas_in_float64(kind):
    steps = np.arange(60)
    for total, warmup, floor, cycles in ((50, 0, 0.0, 0.5), (40, 7, 0.1, 0.5), (30, 5, 0.3, 1.5), (10, 20, 0.2, 0.5)):
        config = OptimConfig(
            lr=0.3,
            lr_scheduler_type=kind,
            lr_warmup_steps=warmup,
            min_lr_ratio=floor,
            num_cycles=cycles,
            total_training_steps=total,
        )
        ours = jax.jit(jax.vmap(learning_rate(config, 1000)))(steps)
        progress = np.clip((steps - warmup) / max(total - warmup, 1), 0, 1)
        shape = {
            "constant": np.ones(60),
            "cosine": (1 + np.cos(2 * np.pi * cycles * progress)) / 2,
            "linear": 1 - progress,
        }[kind]
        lowest = 0.0 if kind == "constant" else floor
        factor = np.where(steps < warmup, steps / max(warmup, 1), shape)
        np.testing.assert_allclose(ours, 0.3 * (lowest + (1 - lowest) * factor), rtol=1e-5, atol=1e-7)


def test_a_decay_ends_at_its_floor_and_own_length_wins():
    config = OptimConfig(lr=2.0, lr_scheduler_type="cosine", min_lr_ratio=0.25, total_training_steps=8)
    schedule = learning_rate(config, 1000)
    assert [float(schedule(step)) for step in (0, 4, 8, 500)] == pytest.approx([2.0, 1.25, 0.5, 0.5])
    cycles = learning_rate(dataclasses.replace(config, num_cycles=1.0), 1000)
    assert [float(cycles(step)) for step in (0, 4, 8)] == pytest.approx([2.0, 0.5, 2.0])


def test_optimizers_are_found_by_name_in_any_case():
    for name in ("adamw", "AdamW", "LION"):
        make_optimizer(OptimConfig(optimizer=name), 10, DECAYED, KEY)
    make_optimizer(OptimConfig(optimizer="SGD", weight_decay=0.0), 10, DECAYED, KEY)
    with pytest.raises(ValueError, match=r"actor\.optim\.optimizer=AdamWW: optax has no optimizer"):
        make_optimizer(OptimConfig(optimizer="AdamWW"), 10, DECAYED, KEY)
    with pytest.raises(ValueError, match=r"SGD has no weight decay: set .*weight_decay=0"):
        make_optimizer(OptimConfig(optimizer="SGD"), 10, DECAYED, KEY)
