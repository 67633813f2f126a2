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


def failed_to_start(error: BaseException) -> bool:
    """Whether an actor is gone because its own code raised while it was made: another attempt would raise again."""
    return isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed


def cause_of(error: BaseException) -> str:
    """The line of `error` that says why: the first, before tables and identifiers for Ray's own log.

    Of an actor that failed to start, the last: what was raised, after the traceback.
    """
    lines = [line.strip() for line in told(error).splitlines() if line.strip()]
    return lines[-1 if failed_to_start(error) else 0] if lines else type(error).__name__
