"""One rollout engine out of many replicas: routes requests, survives replicas that die, keeps all on one version."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_ppo.rollout.deadline import within
from jaxrl_ppo.rollout.dispatch import Dispatcher
from jaxrl_ppo.rollout.engine import Completion, Request, RolloutEngine
from jaxrl_ppo.rollout.errors import RequestError, RolloutError, told
from jaxrl_ppo.weights.manifest import WeightError, WeightManifest

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

DESCRIBED_CHARACTERS = 400  # of an error from another process; Ray adds tables to some
GENERATION, WEIGHTS, START = (f"trainer.deadlines.{name}_s" for name in ("generation", "weights", "start"))


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds, by the keys that a run takes them from, and how much failing is too much."""

    completion_s: float = 1800.0  # GENERATION: a replica that finishes none of its requests for so long has failed
    load_s: float = 900.0  # WEIGHTS: for the load, the probe after it, and falling asleep
    health_s: float = 60.0
    replace_s: float = 1800.0  # START
    close_s: float = 60.0
    backoff_s: float = 1.0  # before the second replacement in a row; doubles with each further one
    max_attempts: int = 3  # replicas that one request may fail on
    max_replacements: int = 3  # of one replica without a completion in between


OnFault = Callable[[str, str], None]  # gets a fault's name, as metrics have it, and what happened


def log_fault(name: str, message: str) -> None:
    """Where faults go when nobody else wants them."""
    logger.warning("%s: %s", name, message)


@dataclasses.dataclass(eq=False, slots=True)
class _Call:
    """One `generate`: what it has received, and the streams that feed it."""

    results: asyncio.Queue[Completion | Exception] = dataclasses.field(default_factory=asyncio.Queue)
    streams: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)


class Router:
    """What the pipeline rolls out with: one engine over `replicas`, each a RolloutEngine (in a run, a Ray actor).

    Each request runs on the least loaded replica and is yielded as it finishes. When a replica raises, ends early or
    lets a deadline pass, its unfinished requests go to the others, and `replace(index)` is asked for a new replica in
    its place: it must stop what is left of the old one, and may raise. The new one gets the current weights before it
    gets requests. Without `replace` the others go on alone.

    `verify(index, replica, manifest)` is awaited whenever a replica has loaded weights, and raises WeightError when it
    finds that they are not what the replica runs.

    Everything runs on one event loop.
    """

    def __init__(
        self,
        replicas: Sequence[RolloutEngine],
        *,
        replace: Callable[[int], Awaitable[RolloutEngine]] | None = None,
        verify: Callable[[int, RolloutEngine, WeightManifest], Awaitable[None]] | None = None,
        limits: Limits | None = None,
        on_fault: OnFault = log_fault,
        max_in_flight: int | None = None,
    ) -> None:
        self._replicas = list(replicas)
        self._replace = replace
        self._verify = verify
        self._limits = limits or Limits()
        self._on_fault = on_fault
        self._dispatcher = Dispatcher(len(replicas), max_in_flight, self._limits.max_attempts)
        self._tickets: dict[int, tuple[_Call, Request]] = {}
        self._next_ticket = itertools.count()
        self._streams: list[set[asyncio.Task[None]]] = [set() for _ in replicas]
        self._recovering: dict[int, asyncio.Task[None]] = {}
        self._failed_in_a_row = [0] * len(replicas)
        self._causes: dict[int, BaseException] = {}
        self._manifest: WeightManifest | None = None

    @property
    def loads(self) -> list[int]:
        """Unfinished requests of each replica."""
        return self._dispatcher.loads

    @property
    def live(self) -> list[int]:
        """Indices of the replicas that serve."""
        return self._dispatcher.live

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Yield each completion as it finishes, in any order. Leaving the iteration aborts what is unfinished.

        Raises RequestError for a request that cannot be served, and RolloutError naming replica and request when one
        failed too often or no replica is left.
        """
        ids = [request.id for request in requests]
        if len(set(ids)) < len(ids):
            twice = next(id for id in ids if ids.count(id) > 1)
            raise RequestError(f"request {twice} was submitted twice in one call")
        call = _Call()
        mine = [next(self._next_ticket) for _ in requests]
        self._tickets |= {ticket: (call, request) for ticket, request in zip(mine, requests)}
        self._dispatcher.submit(mine)
        self._pump()
        self._fail_stranded()
        try:
            for _ in requests:
                result = await call.results.get()
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            for ticket in mine:
                if self._tickets.pop(ticket, None):
                    self._dispatcher.finished(ticket)
            for stream in call.streams:
                stream.cancel()
            self._pump()

    async def load_weights(self, manifest: WeightManifest) -> None:
        """Give `manifest` to all replicas at once; a replica that is being replaced gets it when it joins.

        Raises WeightError when every replica refuses the weights: then they are at fault, not the replicas.
        """
        self._manifest = manifest
        await self._until_one_lives()
        serving = {index: self._replicas[index] for index in self.live}
        failed = await self._each(serving, lambda index, replica: self._load(index, replica, manifest))
        errors = list(failed.values())
        if len(failed) == len(serving) and all(isinstance(error, WeightError) for error in errors):
            raise errors[0]
        for index, error in failed.items():
            self._fail(index, serving[index], error)
        await self._until_one_lives()

    async def sleep(self) -> None:
        """Put every replica to sleep, until `load_weights`; one that cannot is replaced first.

        A replacement under way is waited for: it must not come up on devices that are somebody else's by then.
        """
        asleep = False
        while not asleep or self._recovering:
            if self._recovering:
                await asyncio.wait(self._recovering.values())
            serving = {index: self._replicas[index] for index in self.live}
            failed = await self._each(
                serving,
                lambda index, replica: within(
                    replica.sleep(), self._limits.load_s, f"replica {index} to fall asleep ({WEIGHTS})"
                ),
            )
            for index, error in failed.items():
                self._fail(index, serving[index], error)
            asleep = not failed

    async def score(self, token_ids: Sequence[int]) -> list[np.ndarray]:
        """Log-probs of `token_ids` (see RolloutEngine.score) from every living replica, in order.

        A replica that fails is replaced and left out. Raises RolloutError when none is left.
        """
        scores: dict[int, np.ndarray] = {}

        async def score(index: int, replica: RolloutEngine) -> None:
            what = f"replica {index} to score {len(token_ids)} tokens ({WEIGHTS})"
            scores[index] = await within(replica.score(token_ids), self._limits.load_s, what)

        while not scores:
            await self._until_one_lives()
            serving = {index: self._replicas[index] for index in self.live}
            failed = await self._each(serving, score)
            for index, error in failed.items():
                if isinstance(error, RequestError):
                    raise error
                self._fail(index, serving[index], error)
        return [scores[index] for index in sorted(scores)]

    async def check_health(self) -> None:
        """Ask every replica; those that fail are replaced. Raises RolloutError when none is left."""
        serving = {index: self._replicas[index] for index in self.live}
        failed = await self._each(
            serving,
            lambda index, replica: within(
                replica.check_health(), self._limits.health_s, f"replica {index} to answer a health check"
            ),
        )
        for index, error in failed.items():
            self._fail(index, serving[index], error)
        await self._until_one_lives()

    async def close(self) -> None:
        """Close all replicas; one that does not close in time is logged and left."""
        tasks = [*self._recovering.values(), *itertools.chain.from_iterable(self._streams)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        failed = await self._each(
            dict(enumerate(self._replicas)),
            lambda index, replica: within(replica.close(), self._limits.close_s, f"replica {index} to close"),
        )
        for index, error in failed.items():
            logger.warning("replica %d did not close: %s", index, describe(error))

    def _pump(self) -> None:
        """Start what may start: one stream per replica and call."""
        for index, tickets in self._dispatcher.take().items():
            calls: dict[_Call, list[int]] = {}
            for ticket in tickets:
                calls.setdefault(self._tickets[ticket][0], []).append(ticket)
            for call, some in calls.items():
                stream = asyncio.create_task(self._stream(index, call, some))
                for streams in (self._streams[index], call.streams):
                    streams.add(stream)
                    stream.add_done_callback(streams.discard)

    async def _stream(self, index: int, call: _Call, tickets: list[int]) -> None:
        replica = self._replicas[index]
        pending = {self._tickets[ticket][1].id: ticket for ticket in tickets}
        completions = replica.generate([self._tickets[ticket][1] for ticket in tickets])
        try:
            while True:
                what = f"replica {index} to finish one of {len(pending)} requests ({some_of(pending)}) ({GENERATION})"
                completion = await within(anext(completions), self._limits.completion_s, what)
                completion.replica = index
                ticket = pending.pop(completion.request_id)
                del self._tickets[ticket]
                self._dispatcher.finished(ticket)
                self._failed_in_a_row[index] = 0
                call.results.put_nowait(completion)
                self._pump()
        except RequestError as error:
            call.results.put_nowait(error)
        except StopAsyncIteration:
            if pending:
                left = RolloutError(f"ended with {len(pending)} requests unfinished ({some_of(pending)})")
                self._fail(index, replica, left)
        except Exception as error:
            self._fail(index, replica, error)

    def _fail(self, index: int, replica: RolloutEngine, error: BaseException) -> None:
        """Take a replica out, requeue its requests, start replacing it. A replica already taken out is ignored."""
        if index not in self.live or self._replicas[index] is not replica:
            return
        self._on_fault("replica_failed", f"replica {index} failed with {self.loads[index]} requests: {describe(error)}")
        self._causes[index] = error
        for ticket in self._dispatcher.failed(index):
            call, request = self._tickets.pop(ticket)
            failure = RolloutError(
                f"request {request.id} (prompt of {len(request.prompt_ids)} tokens) failed on "
                f"{self._limits.max_attempts} replicas, the last one replica {index}: {describe(error)}"
            )
            failure.__cause__ = error
            call.results.put_nowait(failure)
        for stream in self._streams[index] - {asyncio.current_task()}:
            stream.cancel()
        if self._replace is not None:
            self._recovering[index] = asyncio.create_task(self._recover(index, self._replace))
        self._pump()
        self._fail_stranded()

    async def _recover(self, index: int, replace: Callable[[int], Awaitable[RolloutEngine]]) -> None:
        limits = self._limits
        while (attempt := self._failed_in_a_row[index]) < limits.max_replacements:
            self._failed_in_a_row[index] += 1
            if attempt:
                await asyncio.sleep(limits.backoff_s * 2 ** (attempt - 1))
            try:
                what = f"the replacement of replica {index} ({START})"
                replica = await within(replace(index), limits.replace_s, what)
                await self._catch_up(index, replica)
            except Exception as error:
                self._on_fault(
                    "replacement_failed", f"replacement {attempt + 1} of replica {index} failed: {describe(error)}"
                )
                self._causes[index] = error
                continue
            self._on_fault("replica_replaced", f"replica {index} was replaced, and serves")
            self._replicas[index] = replica
            self._recovering.pop(index)
            self._dispatcher.joined(index)
            self._pump()
            return
        self._on_fault("replica_given_up", f"replica {index} is given up after {limits.max_replacements} replacements")
        self._recovering.pop(index)
        self._fail_stranded()

    async def _catch_up(self, index: int, replica: RolloutEngine) -> None:
        """Load the current weights; again, if newer ones came meanwhile."""
        loaded = None
        while (manifest := self._manifest) is not None and manifest is not loaded:
            await self._load(index, replica, manifest)
            loaded = manifest

    async def _load(self, index: int, replica: RolloutEngine, manifest: WeightManifest) -> None:
        what = f"replica {index} to load weight version {manifest.version} ({WEIGHTS})"
        await within(replica.load_weights(manifest), self._limits.load_s, what)
        if self._verify is not None:
            what = f"the probe of replica {index} ({WEIGHTS})"
            await within(self._verify(index, replica, manifest), self._limits.load_s, what)

    async def _until_one_lives(self) -> None:
        while not self.live:
            if not self._recovering:
                raise self._nobody_left()
            await asyncio.wait(self._recovering.values(), return_when=asyncio.FIRST_COMPLETED)

    def _fail_stranded(self) -> None:
        """Fail the requests that wait although no replica lives or is being replaced."""
        if self.live or self._recovering:
            return
        for ticket in self._dispatcher.waiting:
            self._dispatcher.finished(ticket)
            self._tickets.pop(ticket)[0].results.put_nowait(self._nobody_left())

    def _nobody_left(self) -> RolloutError:
        causes = "; ".join(f"replica {index}: {describe(error)}" for index, error in sorted(self._causes.items()))
        return RolloutError(f"no rollout replica is left ({causes})")

    @staticmethod
    async def _each(
        replicas: dict[int, RolloutEngine],
        act: Callable[[int, RolloutEngine], Coroutine[Any, Any, None]],
    ) -> dict[int, BaseException]:
        """Do the same on several replicas at once: index -> error of those that failed."""
        results = await asyncio.gather(*(act(*item) for item in replicas.items()), return_exceptions=True)
        return {index: result for index, result in zip(replicas, results) if isinstance(result, BaseException)}


def some_of(ids: dict[str, int], limit: int = 4) -> str:
    """The first few ids, for a message."""
    return ", ".join(itertools.islice(ids, limit)) + (", ..." if len(ids) > limit else "")


def describe(error: BaseException) -> str:
    """An error's type and text, in one line. One that crossed processes has the original as `cause`."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        error = cause
    text = textwrap.shorten(told(error), DESCRIBED_CHARACTERS, placeholder=" ...")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
