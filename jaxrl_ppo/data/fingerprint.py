"""Compares what the data of a run are, in a few numbers, with what a checkpoint says that they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxrl_ppo.data.rows import DataError


def check_same_data(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise DataError, with what differs, when a checkpoint's fingerprint of its data is not the run's."""
    if differences := list(_differences(saved, current, "")):
        raise DataError(
            "the training data are not those of the checkpoint: " + "; ".join(differences) + ". "
            "Resume with the same data, or start anew with trainer.resume_mode=disable"
        )


def _differences(then: Any, now: Any, name: str) -> Iterator[str]:
    """What differs between two values of a fingerprint, in words."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            yield from _differences(then.get(key), now.get(key), f"{name} {key}".strip())
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for a, b in zip(then, now):
            yield from _differences(a, b, a.get("file", name) if isinstance(a, dict) else name)
    elif isinstance(then, list) and isinstance(now, list):
        yield f"there were {len(then)} files and are {len(now)}"
    elif then != now:
        yield f"{name} was {then} and is {now}"
