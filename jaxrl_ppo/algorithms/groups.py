"""Statistics over prompt groups, each at every sample; static shapes, whatever the groups are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.algorithms.masked import Array

# Scores of a group that differ by no more than this are all the same: the group teaches nothing.
SIGNAL_TOLERANCE = 1e-6


def group_sum(x: Array, group: Array) -> jax.Array:
    """The sum of x [B, ...] over each sample's group, at each sample. `group` [B] int holds ids from 0 to B - 1."""
    return jax.ops.segment_sum(x, group, num_segments=group.shape[0])[group]


def group_size(group: Array) -> jax.Array:
    """The number of samples in each sample's group, [B] float32."""
    return group_sum(jnp.ones(group.shape, jnp.float32), group)


def group_min(x: Array, group: Array) -> jax.Array:
    """The least x [B] of each sample's group, [B]."""
    return jax.ops.segment_min(x, group, num_segments=group.shape[0])[group]


def group_mean(x: Array, group: Array) -> jax.Array:
    """The mean of x [B] over each sample's group, [B]."""
    return group_sum(x, group) / group_size(group)


def centred(x: Array, group: Array) -> jax.Array:
    """x [B] minus its group's mean, [B]. Exactly 0 throughout a group of equal values."""
    # Measured from the group's least value, equal scores are exact zeros and cannot become rounding noise that a
    # division by a tiny standard deviation would blow up.
    shifted = jnp.asarray(x) - group_min(x, group)
    return shifted - group_mean(shifted, group)


def group_std(x: Array, group: Array) -> jax.Array:
    """The standard deviation (ddof 1) of x [B] over each sample's group, [B]; 0 for a group of one."""
    squares = group_sum(jnp.square(centred(x, group)), group)
    return jnp.sqrt(squares / jnp.maximum(group_size(group) - 1, 1))


def groups_with_signal(scores: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Which groups carry a signal, [number of groups] bool, indexed by group id.

    A group whose scores [B] all lie within 1e-6 gives every sample the advantage 0; DAPO (arXiv 2503.14476) replaces
    it. A group of one has no one to be equal to and counts as carrying a signal.
    """
    count = int(group.max()) + 1 if len(group) else 0
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, group, scores)
    np.maximum.at(high, group, scores)
    return (high - low > SIGNAL_TOLERANCE) | (np.bincount(group, minlength=count) == 1)


def zero_signal_groups(scores: np.ndarray, group: np.ndarray) -> int:
    """How many groups carry no signal: the metric actor/zero_signal_groups. `scores` [B], `group` [B] int."""
    present = np.bincount(group) > 0 if len(group) else np.zeros(0, bool)
    return int(np.sum(present & ~groups_with_signal(scores, group)))
