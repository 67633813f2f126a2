"""Rejection of tokens and sequences on which the trainer and the rollout engine disagree too much."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxrl_ppo.algorithms.masked import SequenceSum
from jaxrl_ppo.algorithms.settings import CorrectionSettings

RULES = (
    *(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
)
KEY = "algorithm.rollout_correction"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Keep where lower <= statistic <= upper. k1's statistic is a log-ratio, and so are its bounds."""

    level: str  # token, seq_sum, seq_mean or seq_max
    kind: str  # k1, k2 or k3
    lower: float
    upper: float


def parse_rejection(settings: CorrectionSettings) -> tuple[Rule, ...]:
    """The rules of `rollout_rs` with their bounds from `rollout_rs_threshold`; none when rollout_rs is null.

    One threshold serves all rules, or there is one for each. For k1 a threshold bounds the probability ratio,
    `lower_upper` or an upper bound u that stands for 1/u to u; for k2 and k3 it is an upper bound of the divergence.
    Raises ValueError naming the key, the value and what is allowed.
    """
    if settings.rollout_rs is None:
        if settings.rollout_rs_threshold is not None:
            raise ValueError(f"{KEY}.rollout_rs_threshold has no effect without {KEY}.rollout_rs")
        return ()
    names = [name.strip() for name in settings.rollout_rs.split(",")]
    for name in names:
        if name not in RULES:
            raise ValueError(f"{KEY}.rollout_rs has {name!r}, not one of {', '.join(RULES)}")
    if settings.rollout_rs_threshold is None:
        raise ValueError(f"{KEY}.rollout_rs needs {KEY}.rollout_rs_threshold")
    thresholds = [text.strip() for text in str(settings.rollout_rs_threshold).split(",")]
    if len(thresholds) == 1:
        thresholds *= len(names)
    if len(thresholds) != len(names):
        raise ValueError(
            f"{KEY}.rollout_rs_threshold has {len(thresholds)} thresholds for {len(names)} rules; give one, or one each"
        )
    return tuple(_rule(name, threshold) for name, threshold in zip(names, thresholds, strict=True))


def _rule(name: str, threshold: str) -> Rule:
    level, _, kind = name.rpartition("_")
    try:
        bounds = [float(part) for part in threshold.split("_")]
    except ValueError:
        bounds = []
    if len(bounds) == 1 and kind == "k1" and bounds[0] > 1:
        bounds = [1 / bounds[0], bounds[0]]
    if kind == "k1":
        if len(bounds) == 2 and 0 < bounds[0] < bounds[1]:
            return Rule(level, kind, math.log(bounds[0]), math.log(bounds[1]))
        raise ValueError(f"{KEY}.rollout_rs_threshold for {name} is {threshold!r}, not lower_upper or a number above 1")
    if len(bounds) == 1 and bounds[0] > 0:
        return Rule(level, kind, -math.inf, bounds[0])
    raise ValueError(f"{KEY}.rollout_rs_threshold for {name} is {threshold!r}, not one number above 0")


def kept_tokens(log_ratio: Any, mask: Any, rules: tuple[Rule, ...], sequence_sum: SequenceSum) -> Any:
    """Which tokens pass every rule: bool, of log_ratio's shape [..., T], numpy or JAX.

    `log_ratio` is trainer to rollout, clipped. The statistics estimate KL(rollout || trainer): k1 is -log_ratio, k2
    half its square, k3 exp(log_ratio) - 1 - log_ratio. Sums, means and maxima are over the mask of each sequence, and
    the rules on them keep or reject it whole.
    """
    xp = log_ratio.__array_namespace__()
    counted = mask > 0
    log_ratio = xp.where(counted, log_ratio, 0)
    token_statistics = {
        "k1": -log_ratio,
        "k2": 0.5 * log_ratio**2,
        "k3": xp.exp(log_ratio) - 1 - log_ratio,
    }
    length = xp.maximum(sequence_sum(counted.astype(log_ratio.dtype)), 1)
    kept = xp.ones(log_ratio.shape, bool)
    for rule in rules:
        statistic = token_statistics[rule.kind]
        if rule.level in ("seq_sum", "seq_mean"):
            statistic = sequence_sum(statistic)
        if rule.level == "seq_mean":
            statistic = statistic / length
        passes = (statistic >= rule.lower) & (statistic <= rule.upper)
        if rule.level == "seq_max":  # the largest passes exactly when all do
            passes = sequence_sum((counted & ~passes).astype(log_ratio.dtype)) == 0
        kept = kept & passes
    return kept
