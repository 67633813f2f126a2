"""Waiting with a deadline: past half of it a line says what is awaited, past all of it an error does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

from jaxrl_ppo.rollout.errors import DeadlineExceeded

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def within(awaitable: Awaitable[T], seconds: float, what: str) -> T:
    """The awaitable's result. Raises DeadlineExceeded naming `what` after `seconds`; the awaitable is then cancelled.

    An awaitable that is itself cancelled by its deadline gets a moment to clean up, as `asyncio.timeout` does.
    """
    warning = asyncio.get_running_loop().call_later(
        seconds / 2, logger.warning, "still waiting for %s after %.0f of %.0f s", what, seconds / 2, seconds
    )
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await awaitable
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise DeadlineExceeded(f"gave up waiting for {what} after {seconds:g} s") from error
    finally:
        warning.cancel()
