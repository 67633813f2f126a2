"""How far the rollout engine's policy is from the trainer's: metrics for every step, whatever is corrected."""

from __future__ import annotations

import numpy as np


def rollout_metrics(log_probs: np.ndarray, rollout_log_probs: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """Metrics `training/rollout_probs_diff_*` and `rollout_corr/*`; all arguments are [B, T]. None for an empty mask.

    `log_probs` are the trainer's for the same tokens. With r = trainer's / rollout's probability: `kl` and `k3_kl`
    estimate KL(rollout || trainer), `chi2_token` and `chi2_seq` the variance of token and sequence ratios,
    `log_ppl_diff` the difference of mean log-probs per sequence.
    """
    counted = np.asarray(mask) > 0
    lengths = counted.sum(axis=-1)
    if not counted.any():
        return {}
    ours = np.where(counted, log_probs, 0).astype(np.float64)
    theirs = np.where(counted, rollout_log_probs, 0).astype(np.float64)
    difference = np.abs(np.exp(ours) - np.exp(theirs))[counted]
    log_ratio = np.clip(ours - theirs, -20, 20)
    token_ratio = log_ratio[counted]
    sequence_ratio = np.clip((ours - theirs).sum(axis=-1)[lengths > 0], -20, 20)
    log_ppl_diff = (theirs - ours).sum(axis=-1)[lengths > 0] / lengths[lengths > 0]
    metrics = {
        "training/rollout_probs_diff_mean": difference.mean(),
        "training/rollout_probs_diff_max": difference.max(),
        "training/rollout_probs_diff_std": difference.std(),
        "rollout_corr/kl": -token_ratio.mean(),
        "rollout_corr/k3_kl": (np.exp(token_ratio) - 1 - token_ratio).mean(),
        "rollout_corr/chi2_token": np.exp(2 * token_ratio).mean() - 1,
        "rollout_corr/chi2_seq": np.exp(2 * sequence_ratio).mean() - 1,
        "rollout_corr/log_ppl_diff": log_ppl_diff.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(log_ppl_diff).mean(),
    }
    return {name: float(value) for name, value in metrics.items()}


def weight_metrics(weights: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """Spread of the importance weights [B, T] over the mask: extremes, deviation, and effective sample size.

    The effective sample size is (sum w)^2 / (n sum w^2), 1 when all weights are equal.
    """
    chosen = weights[np.asarray(mask) > 0].astype(np.float64)
    if not chosen.size:
        return {}
    square = float(np.sum(chosen**2))
    return {
        "rollout_corr/rollout_is_min": float(chosen.min()),
        "rollout_corr/rollout_is_max": float(chosen.max()),
        "rollout_corr/rollout_is_std": float(chosen.std()),
        "rollout_corr/rollout_is_eff_sample_size": float(np.sum(chosen)) ** 2 / (chosen.size * square)
        if square
        else 0.0,
    }
