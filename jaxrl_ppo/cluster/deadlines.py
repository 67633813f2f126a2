"""No wait without an end: past half its time it says what it waits for, past all of it it fails and says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class DeadlineExceeded(RuntimeError):
    """Something did not happen in the time that `trainer.deadlines` gives it."""


async def within(awaitable: Awaitable[T], seconds: float, what: str, key: str) -> T:
    """The result of `awaitable`, or DeadlineExceeded naming `what` and the deciding `key` after `seconds`."""
    future = asyncio.ensure_future(awaitable)
    try:
        done, _ = await asyncio.wait({future}, timeout=seconds / 2)
        if not done:
            log.warning("%.0f s and still waiting for %s (at most %.0f s: %s)", seconds / 2, what, seconds, key)
            done, _ = await asyncio.wait({future}, timeout=seconds / 2)
        if done:
            return future.result()
    finally:
        future.cancel()
    raise DeadlineExceeded(
        f"{what} took longer than {seconds:.0f} s. Raise {key} if that is its normal speed; else the logs of that "
        f"process say what it was doing."
    )
