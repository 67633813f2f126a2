"""A generative judge on its pool, as the reward manager knows it: servers to ask, replaced when they die."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import ray

from jaxrl_ppo.cluster.deaths import GONE, cause_of
from jaxrl_ppo.cluster.pools import ResourcePoolManager, Role
from jaxrl_ppo.rewards.results import Result, RewardError
from jaxrl_ppo.rollout.deadline import within
from jaxrl_ppo.rollout.router import describe

if TYPE_CHECKING:
    from jaxrl_ppo.rollout.router import OnFault
    from jaxrl_ppo.schema.config import Config

START_ATTEMPTS, BACKOFF_S = 3, 1.0
ANSWER_S, END_S = 15.0, 15.0


@dataclasses.dataclass(eq=False)
class _Server:
    """One server: its process, its address while it serves, the calls that are with it."""

    index: int
    actor: Any = None
    address: str | None = None
    calls: int = 0


class JudgeGroup:
    """Starts, replaces and ends the servers of the judge; each call goes to the one with the fewest."""

    def __init__(
        self, config: Config, pools: ResourcePoolManager, worker_class: Any, *, model_folder: str, on_fault: OnFault
    ):
        self.config, self.pools, self.worker_class = config, pools, worker_class
        self.model_folder, self.on_fault = model_folder, on_fault
        self._servers = [_Server(index) for index in range(pools.pool_of(Role.RewardModel).processes)]
        self._watching: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()  # a server has come up, or will not
        self._broken: str | None = None

    async def start(self) -> None:
        """Start every server, and wait until all answer. Raises EngineDead, DeadlineExceeded."""
        await asyncio.gather(*(self._start(server) for server in self._servers))
        self._watching = [asyncio.create_task(self._watch(server)) for server in self._servers]

    async def ask(self, call: Callable[[str], Awaitable[Result]]) -> Result:
        """The result of `call`, given a server's address; once more where it failed and its server turns out dead.

        Raises RewardError when a server died and cannot be started again.
        """
        for last in (False, True):
            server = await self._least_asked()
            actor, address = server.actor, server.address
            assert address is not None
            server.calls += 1
            try:
                result = await call(address)
            finally:
                server.calls -= 1
            if last or not result.failure or await self._answers(server, actor):
                break
        return result

    async def close(self) -> None:
        """End the servers."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.gather(*(self._end(server) for server in self._servers))

    async def _least_asked(self) -> _Server:
        while True:
            if self._broken is not None:
                raise RewardError(self._broken)
            if live := [server for server in self._servers if server.address is not None]:
                return min(live, key=lambda server: server.calls)
            self._changed.clear()
            await self._changed.wait()  # not for ever: a start has its deadline

    async def _answers(self, server: _Server, actor: Any) -> bool:
        """Whether the server of a call that failed is well; one that is not is killed, which `_watch` notices."""
        if server.actor is not actor or server.address is None:
            return False
        try:
            async with asyncio.timeout(ANSWER_S):
                if await actor.answers.remote():
                    return True
        except (TimeoutError, *GONE):
            pass
        if server.actor is actor:
            server.address = None
            ray.kill(actor)
        return False

    async def _start(self, server: _Server) -> None:
        actor = server.actor = self.worker_class.options(**self.pools.options(Role.RewardModel, server.index)).remote(
            os.getcwd(), self.config
        )
        server.address = await within(
            actor.start.remote(self.model_folder),
            self.config.trainer.deadlines.start_s,
            f"the judge's server {server.index} to start (trainer.deadlines.start_s)",
        )
        self._changed.set()

    async def _watch(self, server: _Server) -> None:
        """Start a server again whenever it ends, as often as that takes."""
        while self._broken is None:
            try:
                how = await server.actor.ended.remote()
            except GONE as error:
                how = f"is gone ({cause_of(error)})"
            server.address = None
            self.on_fault("reward_model_failed", f"the judge's server {server.index} {how}: it is started again")
            await self._start_again(server)

    async def _start_again(self, server: _Server) -> None:
        for attempt in range(START_ATTEMPTS):
            ray.kill(server.actor)
            await asyncio.sleep(BACKOFF_S * 2**attempt - BACKOFF_S)
            try:
                return await self._start(server)
            except Exception as error:  # of whatever kind: the calls that wait for it must hear of it
                why = describe(error)
        self._broken = f"the judge's server {server.index} cannot be started again: {why}"
        self._changed.set()

    async def _end(self, server: _Server) -> None:
        if server.actor is None:
            return
        with contextlib.suppress(TimeoutError, *GONE):
            async with asyncio.timeout(END_S):
                if server.address is not None:
                    await server.actor.close.remote()
        ray.kill(server.actor)
