"""What can go wrong between a caller and a rollout replica, by what the caller should do about it."""


class RequestError(ValueError):
    """A request that no replica can serve. Repeating it is useless."""


class EngineDead(RuntimeError):
    """An engine that is gone. Make a new one, give it the current weights and repeat what was unfinished."""


class DeadlineExceeded(TimeoutError):
    """A wait that took too long; the message says what was awaited."""


class RolloutError(RuntimeError):
    """Rollout cannot go on: replicas failed more often than allowed, or a request failed wherever it ran."""
