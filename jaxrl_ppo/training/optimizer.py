"""The optimizer by its optax name, the learning-rate schedule, and one guarded step over all parameters."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import OptimConfig

Tree = Any


def learning_rate(config: OptimConfig, total_steps: int) -> optax.Schedule:
    """Learning rate of optimizer step 0, 1, …: linear warm-up, then constant, cosine or linear decay.

    `total_steps` is the run's number of optimizer steps, unless `optim.total_training_steps` says otherwise. The first
    of N warm-up steps has rate 0 (min_lr_ratio * lr), as in Hugging Face's and verl's schedules; a decay ends at
    min_lr_ratio * lr. Cosine: SGDR, Loshchilov and Hutter 2017, arXiv 1608.03983, `num_cycles` of 0.5 going down once.
    """
    total = config.total_training_steps if config.total_training_steps > 0 else total_steps
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total)
    floor = 0.0 if config.lr_scheduler_type == "constant" else config.min_lr_ratio

    def schedule(step: jax.Array) -> jax.Array:
        progress = jnp.clip((step - warmup) / max(1, total - warmup), 0.0, 1.0)
        if config.lr_scheduler_type == "cosine":
            shape = 0.5 * (1 + jnp.cos(2 * math.pi * config.num_cycles * progress))
        elif config.lr_scheduler_type == "linear":
            shape = 1 - progress
        else:
            shape = jnp.ones_like(progress)
        factor = jnp.where(step < warmup, step / max(1, warmup), shape)
        return config.lr * (floor + (1 - floor) * factor)

    return schedule


def make_optimizer(config: OptimConfig, total_steps: int, decayed: Tree, key: str) -> optax.GradientTransformation:
    """The optax optimizer that `optim.optimizer` names (any case), with the schedule, betas and weight decay.

    `decayed` is a tree of bools like the parameters: which get weight decay. `key` is where `config` stands in the
    configuration. Raises ValueError, naming it, when optax has no such optimizer or it takes no weight decay and one is
    set.
    """
    make = getattr(optax, config.optimizer.lower(), None)
    accepted = inspect.signature(make).parameters if inspect.isfunction(make) else {}
    if make is None or "learning_rate" not in accepted:
        raise ValueError(f"{key}.optimizer={config.optimizer}: optax has no optimizer of that name; try AdamW")
    arguments: dict[str, Any] = {"learning_rate": learning_rate(config, total_steps)}
    if "b1" in accepted and "b2" in accepted:
        arguments |= {"b1": config.betas[0], "b2": config.betas[1]}
    if "weight_decay" in accepted and "mask" in accepted:
        arguments |= {"weight_decay": config.weight_decay, "mask": decayed}
    elif config.weight_decay:
        raise ValueError(f"{key}.optimizer={config.optimizer} has no weight decay: set {key}.weight_decay=0")
    return make(**arguments)


def apply_gradients(
    optimizer: optax.GradientTransformation, max_norm: float, params: Tree, state: Tree, grads: Tree
) -> tuple[Tree, Tree, jax.Array]:
    """One optimizer step on gradients clipped to the global norm `max_norm`: new parameters, new state, the norm.

    A norm that is not finite changes nothing, the state's step count included. Gradients are float32 trees like
    `params`; the norm is that before clipping.
    """
    norm = optax.tree.norm(grads)
    # A NaN gradient times any scale is NaN: it reaches `updates`, and `keep` throws them away.
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-12))
    updates, new_state = optimizer.update(jax.tree.map(lambda g: g * scale, grads), state, params)
    new_params = optax.apply_updates(params, updates)

    def keep(new: Tree, old: Tree) -> Tree:
        return jax.tree.map(lambda n, o: jnp.where(jnp.isfinite(norm), n, o), new, old)

    return keep(new_params, params), keep(new_state, state), norm
