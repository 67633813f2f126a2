"""Rollout correction: importance weights and rejection for samples that another policy than the trained one drew.

The log-ratio is that of the trainer's old policy to the rollout engine's. In bypass mode no old log-probs are computed:
the policy being trained takes the old one's place inside the loss (`correct_in_loss`), and everything is
decided there, sample by sample. Otherwise it is decided once a step, on the host (`correct_on_host`). The two share
their formulas, which work on numpy and JAX arrays and in any layout.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxrl_ppo.algorithms.masked import SequenceSum
from jaxrl_ppo.algorithms.registry import PolicyLoss
from jaxrl_ppo.algorithms.rejection import kept_tokens, parse_rejection
from jaxrl_ppo.algorithms.settings import CorrectionSettings

KEY = "algorithm.rollout_correction"
SAFE_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True)
class Correction:
    """What the policy loss takes instead of its usual inputs, as arrays of one shape, [B, T] or the caller's layout."""

    mask: Any  # without what was rejected
    importance_weights: Any | None
    metrics: dict[str, Any]  # per token, to be averaged over the mask before rejection


@dataclasses.dataclass(frozen=True)
class LossCorrection(Correction):
    """A Correction made inside the loss, with the log-probs that the policy loss is to take for the old policy's."""

    old_log_probs: jax.Array


def parse_band(threshold: float | str) -> tuple[float | None, float]:
    """`rollout_is_threshold` as (lower, upper): a number is an upper bound alone, `lo_hi` a band.

    Raises ValueError naming the key unless 0 < upper and lower < upper.
    """
    low_text, _, high_text = str(threshold).rpartition("_")
    try:
        low, high = (float(low_text) if low_text else None), float(high_text)
    except ValueError:
        low, high = None, -1.0
    if high <= 0 or (low is not None and not 0 <= low < high):
        raise ValueError(f"{KEY}.rollout_is_threshold is {threshold!r}, not a number above 0 or a band such as 0.5_5.0")
    return low, high


def check_settings(settings: CorrectionSettings, loss: PolicyLoss) -> list[str]:
    """Faults in the settings, each naming its key: thresholds not allowed, and options that could have no effect.

    For the start of a run, after the schema's own checks; only here is it known what the policy loss needs.
    """
    faults = []
    for parse in (lambda: parse_band(settings.rollout_is_threshold), lambda: parse_rejection(settings)):
        try:
            parse()
        except ValueError as error:
            faults.append(str(error))
    if settings.rollout_is_batch_normalize and settings.bypass_mode:
        faults.append(
            f"{KEY}.rollout_is_batch_normalize needs bypass_mode=false: the mean weight of a batch is known only after "
            "a forward pass over all of it"
        )
    if settings.rollout_is is not None and "rollout_log_probs" in loss.needs:
        faults.append(
            f"{KEY}.rollout_is must be null with policy loss {loss.name}, whose ratio is already to the rollout policy"
        )
    return faults


def importance_weights(log_ratio: Any, mask: Any, level: str, threshold: float | str, sequence_sum: SequenceSum) -> Any:
    """Weight of each token, of log_ratio's shape [..., T]; 0 outside the mask.

    `level` token: exp(log_ratio). `level` sequence: exp of its sum over the sample. An upper bound truncates
    (truncated importance sampling, Ionides 2008, doi 10.1198/106186008X320456; for rollout mismatch, Yao et al. 2025);
    outside a band `lo_hi` a weight is 0 (IcePop, Ling Team 2025, arXiv 2510.18855).
    """
    xp = log_ratio.__array_namespace__()
    if level == "sequence":
        log_ratio = xp.clip(sequence_sum(log_ratio), -SAFE_LOG_RATIO, SAFE_LOG_RATIO)
    weights = xp.exp(log_ratio)
    low, high = parse_band(threshold)
    weights = xp.minimum(weights, high) if low is None else xp.where((weights < low) | (weights > high), 0, weights)
    return xp.where(mask > 0, weights, 0).astype(np.float32)


def _correct(
    log_ratio: Any, mask: Any, settings: CorrectionSettings, sequence_sum: SequenceSum
) -> tuple[Any, Any | None, dict[str, Any]]:
    metrics = {}
    weights = None
    if settings.rollout_is is not None:
        weights = importance_weights(log_ratio, mask, settings.rollout_is, settings.rollout_is_threshold, sequence_sum)
        metrics["rollout_corr/rollout_is_mean"] = weights
    kept = mask > 0
    if settings.rollout_rs is not None:
        kept = kept & kept_tokens(log_ratio, mask, parse_rejection(settings), sequence_sum)
        metrics["rollout_corr/rollout_rs_masked_fraction"] = ((mask > 0) & ~kept).astype(np.float32)
    return kept.astype(np.float32), weights, metrics


def _log_ratio(log_probs: Any, rollout_log_probs: Any, mask: Any) -> Any:
    xp = mask.__array_namespace__()
    difference = xp.where(mask > 0, log_probs, 0) - xp.where(mask > 0, rollout_log_probs, 0)
    return xp.clip(difference, -SAFE_LOG_RATIO, SAFE_LOG_RATIO)


def correct_on_host(
    old_log_probs: np.ndarray, rollout_log_probs: np.ndarray, mask: np.ndarray, settings: CorrectionSettings
) -> Correction:
    """Weights, and the mask without what is rejected, for a whole step. All arrays are numpy [B, T].

    Not for bypass mode. Advantages are computed with the mask before rejection: a rejected sample was still one of its
    group's scores. Token weights of the loss take both masks (`aggregation.token_weights`).
    """
    mask = np.asarray(mask, np.float32)

    def sequence_sum(x: Any) -> Any:
        return np.broadcast_to(x.sum(axis=-1, keepdims=True), x.shape)

    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask)
    kept, weights, metrics = _correct(log_ratio, mask, settings, sequence_sum)
    if weights is not None and settings.rollout_is_batch_normalize:
        weights = weights / _mean_weight(weights, mask, settings.rollout_is == "sequence")
    return Correction(kept, weights, metrics)


def _mean_weight(weights: np.ndarray, mask: np.ndarray, by_sequence: bool) -> np.float32:
    """Mean over tokens, or over sequences that have any; 1 when all weights are 0, which no division can mend."""
    share = mask / np.maximum(mask.sum(axis=-1, keepdims=True), 1) if by_sequence else mask
    mean = np.sum(weights * share, dtype=np.float64) / max(np.sum(share, dtype=np.float64), 1e-8)
    return np.float32(mean if mean > 1e-8 else 1.0)


def correct_in_loss(
    log_probs: jax.Array,
    rollout_log_probs: jax.Array,
    mask: jax.Array,
    settings: CorrectionSettings,
    sequence_sum: SequenceSum,
) -> LossCorrection:
    """The same in bypass mode, inside the loss and without a gradient; arrays are [..., T] in the caller's layout.

    Without importance weights the policy loss's ratio is to the rollout policy. With them it is to the policy itself,
    1 in value: the weights alone correct, and do so once.
    """
    current = jax.lax.stop_gradient(log_probs)
    log_ratio = _log_ratio(current, rollout_log_probs, mask)
    kept, weights, metrics = _correct(log_ratio, mask, settings, sequence_sum)
    return LossCorrection(kept, weights, metrics, rollout_log_probs if weights is None else current)
