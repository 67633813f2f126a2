"""The pool of reward processes: user code may hang, crash or run wild there, and costs its own sample at most."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from jaxrl_ppo.rewards.methods import Call, MethodSpec
from jaxrl_ppo.rewards.process import START_TIMEOUT_S, CallHung, ProcessDied, RewardProcess
from jaxrl_ppo.rewards.results import Result, RewardError, failed
from jaxrl_ppo.rewards.wire import Setup
from jaxrl_ppo.user_code import telling_when_slow

log = logging.getLogger(__name__)

CALLS_AT_ONCE = 64  # in one process, of a coroutine function or in a batch
START_ATTEMPTS = 3  # of processes that are killed before they are ready
START_PAUSE_S = 0.5  # before the second attempt; twice that before the third
ALL_HUNG = 16  # calls that hang, and none ever answered: so would all the others


class RewardPool:
    """Up to `num_workers` processes, started as calls need them. All calls must come from one event loop.

    A call past its deadline, or one that takes its process down, costs one result: the process is replaced. A call
    whose process died is tried once more, alone in a fresh process, since it may not have been the cause.
    """

    def __init__(
        self,
        method: MethodSpec,
        *,
        num_workers: int,
        timeout_s: float,
        memory_mb: int | None,
        stop_when_all_hang: bool = True,
    ):
        """`timeout_s` is a call's deadline, from when a process takes it up. `memory_mb` bounds a process's memory.

        `stop_when_all_hang` makes it an error that the first ALL_HUNG calls all hang.
        """
        self._setup = Setup(method, timeout_s, memory_mb)
        self._hung = 0 if stop_when_all_hang else None  # calls that did; None once any other has ended
        self._num_workers = num_workers
        self._started: set[RewardProcess] = set()  # all that have not ended yet
        self._shared: set[RewardProcess] = set()  # those among them that any call may go to
        self._retries = asyncio.Semaphore(num_workers)
        self.on_fault: Callable[[str, str], None] = lambda name, message: log.info("%s: %s", name, message)

    async def start(self) -> None:
        """Start the first process. Raises RewardError when the reward function cannot be loaded."""
        first = await self._start_process()
        self._shared.add(first)
        self._room = CALLS_AT_ONCE if first.many_at_once else 1
        self._slots = asyncio.Semaphore(self._num_workers * self._room)
        # A process may take many calls, and then the next is started only when those before it are full.
        self._starting = asyncio.Semaphore(1 if first.many_at_once else self._num_workers)

    async def score(self, call: Call) -> Result:
        """The outcome of one call; whatever goes wrong in it is in the result, as its failure.

        Raises RewardError when no process can be started any more, or when all calls hang.
        """
        result = await self._score(call)
        if result.failure is None or result.failure.kind != "timeout":
            self._hung = None
        elif self._hung is not None:
            self._hung += 1
            if self._hung >= ALL_HUNG:
                what, limit = self._setup.method.code, f"reward.timeout_s={self._setup.timeout_s:g} s"
                raise RewardError(
                    f"all of the first {self._hung} rewards took more than {limit}, so no others are waited for: "
                    f"{what}. The last was for {call}; where it hung:\n"
                    f"{result.failure.traceback.rstrip() or '(not known: it was waiting)'}\n"
                    "Mend it, or raise reward.timeout_s; reward.max_failure_rate=1 goes on without such rewards"
                )
        return result

    async def _score(self, call: Call) -> Result:
        async with self._slots:
            process = await self._process_with_room()
            try:
                return await process.call(call, self._setup.timeout_s)
            except CallHung as hung:
                self._lost(process, hung, call)
                if not process.many_at_once:
                    return self._timed_out(process)  # else another call may have blocked them all
            except ProcessDied as died:
                self._lost(process, died, call)
        return await self._score_alone(call)

    async def _score_alone(self, call: Call) -> Result:
        async with self._retries:
            process = await self._start_process()
            try:
                result = await process.call(call, self._setup.timeout_s)
            except CallHung as hung:
                self._lost(process, hung, call)
                return self._timed_out(process)
            except ProcessDied as died:
                self._lost(process, died, call)
                return failed("crash", f"{died}, twice", process.tail)
        if process.many_at_once or sum(p.alive for p in self._shared) >= self._num_workers:
            await process.kill()
        else:
            self._shared.add(process)
        return result

    async def close(self) -> None:
        """End all processes, and those that they have started."""
        await asyncio.gather(*(process.kill() for process in self._started))

    async def _start_process(self) -> RewardProcess:
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                with telling_when_slow(self._setup.method.code, START_TIMEOUT_S):
                    process = await RewardProcess.start(self._setup)
                break
            except ProcessDied as died:
                if attempt == START_ATTEMPTS:
                    raise RewardError(f"{died}, {attempt} times in a row") from died
                self.on_fault("reward_worker_lost", f"{died}: another is started")
                await asyncio.sleep(attempt * START_PAUSE_S)
        self._started = {p for p in self._started if not p.ended} | {process}
        return process

    async def _process_with_room(self) -> RewardProcess:
        """A process with room for a call, which its caller makes before anyone else runs."""
        while (process := self._least_busy()) is None:
            async with self._starting:
                if self._least_busy() is None:
                    started = await self._start_process()
                    self._shared.add(started)  # to the set of now: it was made anew while the process started
        return process

    def _least_busy(self) -> RewardProcess | None:
        for process in self._shared:
            if process.found_dead and not process.busy:
                self._lost(process, "a reward process ended while it had no call")
        self._shared = {process for process in self._shared if process.alive}
        with_room = [process for process in self._shared if process.busy < self._room]
        return min(with_room, key=lambda process: process.busy, default=None)

    def _lost(self, process: RewardProcess, how: ProcessDied | CallHung | str, call: Call | None = None) -> None:
        """Tell of a process that ended under its calls, once for all of them; `call` is one."""
        if not process.told_lost:
            process.told_lost = True
            which = "one of its calls was" if process.many_at_once else "the call was"
            about = f"; {which} of {self._setup.method.code}, for {call}" if call else ""
            self.on_fault("reward_worker_lost", f"{how}: it is replaced{about}")

    def _timed_out(self, process: RewardProcess) -> Result:
        return failed("timeout", f"no reward within reward.timeout_s={self._setup.timeout_s:g} s", process.tail)
