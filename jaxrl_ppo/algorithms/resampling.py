"""PF-PPO: which samples of a batch are learned from, and how often, by how much their rewards can be trusted."""

from __future__ import annotations

import numpy as np

METHODS = ("pow", "max_min", "max_random")


def resample(scores: np.ndarray, method: str, power: float, rng: np.random.Generator) -> np.ndarray:
    """B indices into the samples, drawn with replacement by a weight for each score [B]; sorted.

    Policy filtration, Shen and Zhang 2024, arXiv 2409.06957: a reward is trusted most where it is extreme. `method`
    pow: |score|^power; max_min: the best and the worst alone; max_random: the best four times as often as any other.
    Raises ValueError for another method.
    """
    scores = np.asarray(scores, np.float64)
    if method == "pow":
        weights = np.abs(scores) ** power
    elif method == "max_min":
        weights = np.where((scores == scores.max()) | (scores == scores.min()), 1.0, 0.0)
    elif method == "max_random":
        weights = np.where(scores == scores.max(), 0.4, 0.1)
    else:
        raise ValueError(f"algorithm.pf_ppo.reweight_method is {method!r}, not one of {', '.join(METHODS)}")
    weights = weights + 1e-8  # all of them equal where no score is different from 0
    return np.sort(rng.choice(len(scores), len(scores), p=weights / weights.sum()))
