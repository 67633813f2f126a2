"""Random batches, and checks that every algorithm test shares: values, gradients, leaks from outside the mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def settings(**overrides: Any) -> SimpleNamespace:
    """The keys that losses and estimators read, at their defaults but for `overrides`."""
    values: dict[str, Any] = {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 3.0,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "gamma": 0.97,
        "lam": 0.9,
        "norm_adv_by_std_in_grpo": True,
        "clip_cov_ratio": 0.2,
        "clip_cov_lb": -1.0,
        "clip_cov_ub": 5.0,
        "kl_cov_ratio": 0.2,
        "ppo_kl_coef": 0.7,
        "dro_beta": 0.3,
    }
    values |= overrides
    return SimpleNamespace(policy_loss=SimpleNamespace(**values), **values)


def random_mask(rng: np.random.Generator, samples: int, tokens: int) -> np.ndarray:
    """Ragged lengths, holes as tool calls leave them, at least one empty and one full response. [B, T] float32."""
    lengths = rng.integers(1, tokens + 1, samples)
    lengths[0], lengths[-1] = tokens, 0
    mask = np.arange(tokens) < lengths[:, None]
    holes = rng.random((samples, tokens)) < 0.2
    holes[0, :3] = False
    holes[1 : samples // 2] = False
    return (mask & ~holes).astype(np.float32)


def random_groups(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Groups of unequal size in mixed order, one of them a single sample. [B] int32."""
    group = rng.integers(0, max(samples // 3, 1), samples)
    group[rng.integers(samples)] = samples - 1
    return group.astype(np.int32)


def token_case(seed: int, samples: int = 12, tokens: int = 9) -> Arrays:
    """One batch of token arrays [B, T]; a few log-ratios are extreme."""
    rng = np.random.default_rng(seed)
    shape = (samples, tokens)
    old = -rng.exponential(1.0, shape)
    new = np.minimum(old + rng.normal(0, 0.3, shape), -1e-3)
    new[2, 0], old[2, 0] = -0.1, -45.0
    new[3, 0], old[3, 0] = -50.0, -0.1
    new[4, 0], old[4, 0] = -0.2, -9.2
    new[5, 0], old[5, 0] = -9.2, -0.2
    case = {
        "log_probs": new,
        "old_log_probs": old,
        "advantages": rng.normal(size=shape),
        "mask": random_mask(rng, samples, tokens),
        "importance_weights": rng.uniform(0.2, 2.0, shape),
        "rollout_log_probs": np.minimum(old + rng.normal(0, 0.1, shape), -1e-3),
    }
    return {name: value.astype(np.float32) for name, value in case.items()}


def poison(x: np.ndarray, mask: np.ndarray, value: float) -> np.ndarray:
    """x with `value` wherever the mask is 0."""
    return np.where(mask > 0, x, value).astype(np.float32)


def oracle_gradient(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of the sum of a float64 function of x, entry by entry of x.

    Differences are taken before the sum, so that one huge term does not drown the others.
    """
    x = x.astype(np.float64)
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = np.sum(function(up) - function(down)) / (2 * step)
    return gradient


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Equal to `tolerance`, relative to the expected value where that is above 1."""
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=tolerance, atol=tolerance)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Where each token of a padded batch lies after packing: row, column; and the rows' sample ids."""

    row: np.ndarray  # [B, T]
    column: np.ndarray  # [B, T]
    sample_ids: np.ndarray  # [R, S]
    samples_per_row: int

    def pack(self, x: np.ndarray) -> np.ndarray:
        """x [B, T] laid out in rows [R, S]."""
        rows = np.zeros(self.sample_ids.shape, x.dtype)
        rows[self.row, self.column] = x
        return rows

    def unpack(self, rows: np.ndarray) -> np.ndarray:
        """Rows [R, S] back as [B, T]."""
        return rows[self.row, self.column]


def random_packing(rng: np.random.Generator, samples: int, tokens: int, per_row: int) -> Packed:
    """Samples in random order, `per_row` to a row, with padding between and after them."""
    order = rng.permutation(samples)
    width = per_row * (tokens + 2)
    row = np.zeros((samples, tokens), int)
    column = np.zeros((samples, tokens), int)
    sample_ids = np.zeros((-(-samples // per_row), width), np.int32)
    for place, sample in enumerate(order):
        start = (place % per_row) * (tokens + 2) + int(rng.integers(3))
        row[sample] = place // per_row
        column[sample] = start + np.arange(tokens)
        sample_ids[place // per_row, start : start + tokens] = place % per_row
    return Packed(row, column, sample_ids, per_row)
