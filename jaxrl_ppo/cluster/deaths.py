"""How Ray says that one of our processes is gone, and what it says in one line."""

from __future__ import annotations

import ray

from jaxrl_ppo.rollout.errors import told

# OutOfMemoryError is what callers get when Ray's memory monitor kills a process to save its node.
GONE = (
    ray.exceptions.RayActorError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.WorkerCrashedError,
)


def cause_of(error: BaseException) -> str:
    """The first line of `error`; what follows it are tables and identifiers for Ray's own log."""
    lines = [line.strip() for line in told(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
