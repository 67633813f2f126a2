"""Validation metrics: mean, spread, best, worst and majority of several answers to each prompt, per data source."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

DRAWS = 1000
SEED = 42


def validation_metrics(
    sources: Sequence[str],
    prompts: Sequence[Hashable],
    values: dict[str, Sequence[float]],
    predictions: Sequence[Hashable] | None = None,
) -> dict[str, float]:
    """Metrics of a validation run over samples; every argument has one entry per sample.

    `prompts` says which samples answer the same prompt. `values` holds numbers by name, `reward` among them. `acc`,
    or `reward` where there is no `acc`, becomes `val-core/{source}/...`, the others `val-aux/{source}/{name}/...`:
    mean@N, and with N > 1 samples of a prompt std@N and, for k = 2, 4, ... N, best@k/mean and worst@k/mean, the
    expected best and worst of k, and, with `predictions` (a sample's extracted answer), maj@k/mean, the value of
    the commonest answer among k. Expectations are over 1000 draws of k with replacement, from a fixed seed. Each is
    averaged over the source's prompts. A value that is not finite is an error.
    """
    core = "acc" if "acc" in values else "reward"
    rows: dict[tuple[str, Hashable], list[int]] = defaultdict(list)
    for row, key in enumerate(zip(sources, prompts, strict=True)):
        rows[key].append(row)
    collected: dict[str, list[float]] = defaultdict(list)
    for name, column in values.items():
        numbers = np.asarray(column, np.float64)
        if not np.isfinite(numbers).all():
            raise ValueError(f"validation: {name} of sample {np.flatnonzero(~np.isfinite(numbers))[0]} is not finite")
        for (source, _), chosen in rows.items():
            answers = [predictions[row] for row in chosen] if predictions is not None else None
            prefix = f"val-core/{source}/{name}" if name == core else f"val-aux/{source}/{name}"
            for metric, value in _prompt_metrics(numbers[chosen], answers).items():
                collected[f"{prefix}/{metric}"].append(value)
    return {metric: float(np.mean(per_prompt)) for metric, per_prompt in collected.items()}


def _prompt_metrics(numbers: np.ndarray, answers: list[Hashable] | None) -> dict[str, float]:
    count = len(numbers)
    metrics = {f"mean@{count}": float(np.mean(numbers))}
    if count == 1:
        return metrics
    metrics[f"std@{count}"] = float(np.std(numbers))
    for k in _subset_sizes(count):
        drawn = numbers[_draws(count, k)]
        metrics[f"best@{k}/mean"] = float(drawn.max(axis=1).mean())
        metrics[f"worst@{k}/mean"] = float(drawn.min(axis=1).mean())
        if answers is not None:
            metrics[f"maj@{k}/mean"] = float(_majority_values(numbers, answers, _draws(count, k)).mean())
    return metrics


def _subset_sizes(count: int) -> list[int]:
    """2, 4, 8, ... below count, then count itself."""
    sizes = [2**power for power in range(1, count.bit_length()) if 2**power < count]
    return [*sizes, count]


@functools.lru_cache(maxsize=64)
def _draws(count: int, k: int) -> np.ndarray:
    """Indices of DRAWS samples of k out of count with replacement, [DRAWS, k]; always the same."""
    return np.random.RandomState(SEED).choice(count, (DRAWS, k), replace=True)


def _majority_values(numbers: np.ndarray, answers: list[Hashable], drawn: np.ndarray) -> np.ndarray:
    """The value of the first-drawn among the commonest answers of each draw, [DRAWS]."""
    known: dict[Hashable, int] = {}
    labels = np.array([known.setdefault(answer, len(known)) for answer in answers])[drawn]
    votes = (labels[:, :, None] == labels[:, None, :]).sum(axis=-1)
    winner = np.take_along_axis(drawn, votes.argmax(axis=-1)[:, None], axis=-1)[:, 0]
    return numbers[winner]
