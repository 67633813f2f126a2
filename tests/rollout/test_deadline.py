"""Waiting with a deadline: the line past half of it, the error past all of it."""

import asyncio
import logging

import pytest

from jaxrl_ppo.rollout.deadline import within
from jaxrl_ppo.rollout.errors import DeadlineExceeded


async def test_past_half_of_a_deadline_a_line_names_what_is_awaited(caplog):
    caplog.set_level(logging.WARNING)
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(0.6, event.set)
    await within(event.wait(), 1.0, "the moon")
    assert "still waiting for the moon" in caplog.text
    with pytest.raises(DeadlineExceeded, match=r"gave up waiting for the moon after 0\.05 s"):
        await within(asyncio.Event().wait(), 0.05, "the moon")

    async def times_out_by_itself():
        raise TimeoutError("a socket")

    with pytest.raises(TimeoutError, match="a socket"):
        await within(times_out_by_itself(), 5, "the moon")
