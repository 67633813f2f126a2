"""One reward process as its parent sees it: started, sent calls, listened to, killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from typing import Any

from jaxrl_ppo.rewards.methods import Call
from jaxrl_ppo.rewards.results import Failure, Result, RewardError
from jaxrl_ppo.rewards.wire import HEADER, Setup

START_TIMEOUT_S = 300.0  # a reward function's imports may be slow
GRACE_S = 5.0  # where calls share a process, one that only waits is cancelled there, before the process is killed
TRACE_S = 2.0  # for a process that hangs to print where it does
TRACED = b"(most recent call first):\n  File"
TAIL_BYTES = 4096  # of its output, kept for failure reports
SHOWN_BYTES = 1 << 16  # of its output, passed on to standard error


class ProcessDied(Exception):
    """The process ended while it had calls to answer, or was killed before it was ready for them."""


class CallHung(Exception):
    """A call did not end in time, and its process was killed for it."""


class RewardProcess:
    """A running reward process, made by `start`. Belongs to the event loop that it was started in."""

    def __init__(self, process: subprocess.Popen[bytes], answers: asyncio.StreamReader, calls: asyncio.StreamWriter):
        self._process = process
        self._reader = answers
        self._writer = calls
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Result]] = {}
        self._tail = b""
        self._output = asyncio.create_task(self._read_output())
        self._answers: asyncio.Task[None] | None = None
        self._end: asyncio.Task[str] | None = None
        self.many_at_once = False
        self.found_dead = False  # whether it has ended by itself
        self.told_lost = False  # whether its end has been reported

    @property
    def alive(self) -> bool:
        """Whether it takes calls."""
        return self._end is None

    @property
    def ended(self) -> bool:
        """Whether nothing is left of it."""
        return self._end is not None and self._end.done()

    @property
    def busy(self) -> int:
        """Calls that are not answered yet."""
        return len(self._calls)

    @property
    def tail(self) -> str:
        """The end of what it printed."""
        return self._tail.decode(errors="replace")

    @classmethod
    async def start(cls, setup: Setup) -> RewardProcess:
        """Start a process and load the reward function in it.

        Raises RewardError when the function cannot be loaded, ProcessDied when the process is killed meanwhile.
        """
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxrl_ppo.rewards.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # nothing is written: it closes when this process ends, however it does
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that the processes it starts can be killed with it
                env=_environment(),
            )
        finally:
            theirs.close()
        started = cls(process, *await asyncio.open_unix_connection(sock=ours))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                started._send(setup)
                hello = await started._receive()
            if "error" in hello:
                raise RewardError(hello["error"])
        except (EOFError, OSError) as error:
            how = await started.kill()
            what = f"a reward process {how} before it was ready"
            killed = started._process.returncode < 0  # from outside, or for want of memory: another may fare better
            raise ProcessDied(what) if killed else RewardError(f"{what}:\n{started.tail}") from error
        except TimeoutError as error:
            await started.kill()
            raise RewardError(
                f"not loaded within {START_TIMEOUT_S:g} s: {setup.method.code}: the file does too much when it is "
                f"imported\n{started.tail}"
            ) from error
        except BaseException:
            await started.kill()
            raise
        started.many_at_once = hello["many_at_once"]
        started._answers = asyncio.create_task(started._read_answers())
        return started

    async def call(self, call: Call, timeout_s: float) -> Result:
        """The outcome of one call. Raises ProcessDied or CallHung; the process is gone then."""
        number = next(self._numbers)
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self._send((number, call))
            async with asyncio.timeout(timeout_s + (GRACE_S if self.many_at_once else 0)):
                return await answer
        except TimeoutError:
            if self.alive:
                self._process.send_signal(signal.SIGUSR1)  # it prints where it is
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TRACE_S):
                        while TRACED not in self._tail:
                            await asyncio.sleep(0.05)
            await self.kill()
            raise CallHung(f"a reward process was killed, since a call took more than {timeout_s:g} s") from None
        except asyncio.CancelledError:
            if not self.many_at_once:  # it is busy with a call that nobody waits for any more
                await self.kill()
            raise
        finally:
            del self._calls[number]

    async def kill(self) -> str:
        """End the process, and what it has started; how it ended, in words. May be called again."""
        if self._end is None:
            self._end = asyncio.create_task(self._finish())
        return await asyncio.shield(self._end)

    async def _finish(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = await asyncio.to_thread(self._process.wait)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        await asyncio.wait([self._output], timeout=1)  # the rest of what it printed, for failure reports
        for task in filter(None, (self._output, self._answers)):
            task.cancel()
        self._writer.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ProcessDied(f"the reward process {how}"))
        return how

    def _send(self, message: Any) -> None:
        try:
            data = pickle.dumps(message, protocol=5)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RewardError(
                f"a row's ground_truth or extra_info cannot be sent to a reward process: {error}"
            ) from error
        self._writer.write(HEADER.pack(len(data)) + data)

    async def _receive(self) -> dict[str, Any]:
        (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return json.loads(await self._reader.readexactly(size))

    async def _read_answers(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # what readexactly raises at the end is an EOFError
            while True:
                answer = await self._receive()
                waiting = self._calls.get(answer["call"])
                if waiting is not None and not waiting.done():
                    result = answer["result"]
                    failure = Failure(**result["failure"]) if result["failure"] else None
                    waiting.set_result(Result(**(result | {"failure": failure})))
        self.found_dead = self._end is None
        await self.kill()

    async def _read_output(self) -> None:
        output = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), self._process.stdout
        )
        shown = 0
        try:
            while data := await output.read(1 << 16):
                self._tail = (self._tail + data)[-TAIL_BYTES:]
                if shown < SHOWN_BYTES:
                    sys.stderr.write(data[: SHOWN_BYTES - shown].decode(errors="replace"))
                    if shown + len(data) > SHOWN_BYTES:
                        sys.stderr.write("\n[further output of this reward process is not shown]\n")
                    shown += len(data)
        finally:
            transport.close()


def _environment() -> dict[str, str]:
    """The parent's, importing what it can import, without its accelerator, and with one thread for numerics."""
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "JAX_PLATFORMS": "cpu",
    }
