"""What can go wrong between a caller and a rollout replica, by what the caller should do about it."""

import re

# What Ray's memory monitor says of a process that it has killed, before tables for its own log.
_LOW_ON_MEMORY = re.compile(r"low on memory.*?was ([\d.]+ ?GB)(?: used)? / ([\d.]+ ?GB)", re.DOTALL)


class RequestError(ValueError):
    """A request that no replica can serve. Repeating it is useless."""


class EngineDead(RuntimeError):
    """An engine that is gone. Make a new one, give it the current weights and repeat what was unfinished."""


class DeadlineExceeded(TimeoutError):
    """A wait that took too long; the message says what was awaited."""


class RolloutError(RuntimeError):
    """Rollout cannot go on: replicas failed more often than allowed, or a request failed wherever it ran."""


def told(error: BaseException) -> str:
    """An error's text; for a process that was killed for want of memory, what a person needs to know of that."""
    low = _LOW_ON_MEMORY.search(str(error))
    if low is None:
        return str(error)
    return (
        f"killed for want of memory: {low[1]} of its node's {low[2]} were in use, by this run and all else there. Free "
        "some, or have the run need less: shorter responses, fewer tokens or samples at a time, fewer replicas"
    )
