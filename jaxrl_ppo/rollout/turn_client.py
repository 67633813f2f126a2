"""Single requests of many agent loops, handed to the engine in as few calls as possible."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from jaxrl_ppo.rollout.engine import Completion, Request


class Generates(Protocol):
    """A rollout engine, or the router over several."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Yield completions as they finish, in any order."""
        ...


class TurnClient:
    """Asks `engine` for completions. Requests made in the same turn of the event loop go to it in one call, in order:
    the first turns of a batch therefore start together, as they would without agent loops."""

    def __init__(self, engine: Generates):
        self._engine = engine
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def complete(self, request: Request) -> Completion:
        """The completion of one request. Raises what the engine does."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._submit)  # after every loop that can go on now has asked
        self._waiting.append((request, future))
        return await future

    def close(self) -> None:
        """Abort what is unfinished."""
        for call in self._calls:
            call.cancel()

    def _submit(self) -> None:
        waiting, self._waiting = self._waiting, []
        call = asyncio.create_task(self._run(waiting))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _run(self, waiting: list[tuple[Request, asyncio.Future[Completion]]]) -> None:
        futures = {request.id: future for request, future in waiting}
        try:
            async for completion in self._engine.generate([request for request, _ in waiting]):
                future = futures.pop(completion.request_id)
                if not future.done():  # its loop was cancelled
                    future.set_result(completion)
        except Exception as error:
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)
