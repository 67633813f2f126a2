"""The reward process: `python -m jaxrl_ppo.rewards.worker FD` answers calls that come over the socket FD.

It may hang, crash or be killed at any moment; the pool (pool.py) copes. User code runs in the main thread, since
libraries such as math-verify use alarm signals. Requests are pickled, answers are JSON: what comes back from a process
that ran user code is never unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import inspect
import json
import logging
import os
import pickle
import queue
import resource
import signal
import socket
import sys
import threading
from typing import Any

from jaxrl_ppo.guard import guard
from jaxrl_ppo.rewards.methods import Call, Method
from jaxrl_ppo.rewards.results import Result, WrongResult, failed, from_exception
from jaxrl_ppo.rewards.wire import HEADER, Setup
from jaxrl_ppo.user_code import UserCodeError, telling_when_slow


class Link:
    """Frames over the socket: requests in, answers out."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._sending = threading.Lock()

    def receive(self) -> Any:
        """The next request; EOFError when the parent is gone."""
        return pickle.loads(self._read(HEADER.unpack(self._read(HEADER.size))[0]))

    def send(self, answer: dict[str, Any]) -> None:
        """Send one answer."""
        data = json.dumps(answer).encode()
        with self._sending:
            self._sock.sendall(HEADER.pack(len(data)) + data)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = self._sock.recv(min(size - len(data), 1 << 20))
            if not more:
                raise EOFError
            data += more
        return bytes(data)


def main() -> None:
    """Load the reward function, say so, and answer calls until the parent closes the socket or dies."""
    _end_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the parent asks a call that hangs where it does
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    setup: Setup = link.receive()
    logging.getLogger(telling_when_slow.__module__).disabled = True  # the parent tells how long this takes
    try:
        method = Method(setup.method)
    except UserCodeError as error:
        link.send({"error": str(error)})
        return
    except SystemExit as error:
        link.send({"error": f"the reward function's file called sys.exit({error.code!r}) while it was loaded"})
        return
    except BaseException as error:  # a user's class may raise anything when it is made
        link.send({"error": from_exception(error).failure.message})  # type: ignore[union-attr]
        raise
    if setup.memory_mb is not None:
        # Data, not address space: libraries reserve far more of that than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (setup.memory_mb << 20, setup.memory_mb << 20))
    link.send({"many_at_once": method.mode != "single"})
    if method.mode == "concurrent":
        asyncio.run(_serve_concurrently(link, method, setup.timeout_s))
    else:
        _serve(link, method)


def _end_with_parent() -> None:
    """End when the parent does, with whatever processes the user's code has started; and give that no input."""
    guard(0)
    with open(os.devnull) as nowhere:
        os.dup2(nowhere.fileno(), 0)


def _serve(link: Link, method: Method) -> None:
    """One call after the other, or as many as are waiting in one batch.

    A call that takes too long is the parent's to end, with the whole process.
    """
    calls: queue.SimpleQueue[tuple[int, Call]] = queue.SimpleQueue()
    _watch_socket(link, calls.put)
    with asyncio.Runner() as runner:
        while True:
            waiting = [calls.get()]
            while method.mode == "batch" and not calls.empty():
                waiting.append(calls.get())
            for (number, _), result in zip(waiting, _results(method, [call for _, call in waiting], runner)):
                link.send({"call": number, "result": dataclasses.asdict(result)})


def _results(method: Method, calls: list[Call], runner: asyncio.Runner) -> list[Result]:
    """The outcomes of calls. A batch that fails is made again call by call, so that it costs only the bad sample."""
    try:
        if method.mode == "batch":
            values = method.start_batch(calls)
        else:
            value = method.start(calls[0])
            values = [runner.run(_wait_for(value)) if inspect.isawaitable(value) else value]
    except BaseException as error:  # SystemExit too: a sample's failure does not end the process
        if len(calls) > 1:
            return [result for call in calls for result in _results(method, [call], runner)]
        return [from_exception(error)]
    return [_finished(method, value, call) for value, call in zip(values, calls)]


def _finished(method: Method, value: Any, call: Call) -> Result:
    try:
        return method.finish(value, call)
    except WrongResult as error:
        return from_exception(error)


async def _wait_for(value: Any) -> Any:
    return await value


async def _serve_concurrently(link: Link, method: Method, timeout_s: float) -> None:
    """Every call as a task of its own. One that only waits too long is cancelled; one that blocks, the parent ends."""
    loop = asyncio.get_running_loop()
    calls: asyncio.Queue[tuple[int, Call]] = asyncio.Queue()
    _watch_socket(link, lambda item: loop.call_soon_threadsafe(calls.put_nowait, item))
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, call: Call) -> None:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                result = method.finish(await method.start(call), call)
        except BaseException as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                result = failed("timeout", f"no reward within reward.timeout_s={timeout_s:g} s")
            else:
                result = from_exception(error)
        link.send({"call": number, "result": dataclasses.asdict(result)})

    while True:
        number, call = await calls.get()
        task = asyncio.create_task(answer(number, call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _watch_socket(link: Link, put: Any) -> None:
    """Read requests in a thread, so that the next one is there when user code has ended."""

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                put(link.receive())
        os.killpg(0, signal.SIGKILL)  # the pool is closed

    threading.Thread(target=read, daemon=True).start()


if __name__ == "__main__":
    main()
