"""Ends a driver that Ray does not let go on. Run as a program, it is the process that watches one.

Ray holds the interpreter's lock while it connects, so that no thread of the driver could tell of the wait or end it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

TELL_S = 1.0  # from the deadline to the driver's end: by then the watch has told why
POLL_S = 0.1


@contextlib.contextmanager
def start_watch(what: str, deadline_s: float, failure: str) -> Iterator[None]:
    """End this process with exit status 1, and all that it starts, where the block takes longer than `deadline_s`.

    Half-way a line on standard output says that `what` is still waited for; at the end `failure` goes to standard
    error. Both hold while the interpreter's lock is held.
    """
    end = time.monotonic() + deadline_s
    with open(os.devnull, "w") as nowhere:  # for the tracebacks
        watch = subprocess.Popen(
            # -P, since modules beside this file have names of the standard library
            [sys.executable, "-P", __file__, what, str(deadline_s), str(end), failure],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for the driver
        )
        faulthandler.dump_traceback_later(deadline_s + TELL_S, exit=True, file=nowhere)  # needs no lock
        try:
            yield
        finally:
            if time.monotonic() >= end:
                time.sleep(2 * TELL_S)  # the end is under way
            faulthandler.cancel_dump_traceback_later()
            watch.communicate(b".")


def main() -> None:
    """Watch the process that started this one; over as soon as it says so through standard input, or is gone."""
    what, failure = sys.argv[1], sys.argv[4]
    deadline_s, end = map(float, sys.argv[2:4])  # `end` by the clock that all processes share
    driver = psutil.Process(os.getppid())
    if _over(end - deadline_s / 2, end):
        return
    print(f"still waiting for {what} after {deadline_s / 2:.0f} of {deadline_s:.0f} s", flush=True)
    if _over(end, end):
        return
    print(failure, file=sys.stderr, flush=True)
    started: set[psutil.Process] = set()
    while not select.select([0], [], [], POLL_S)[0]:
        with contextlib.suppress(psutil.NoSuchProcess):
            started |= _started_by(driver)
    for process in {relative for child in started for relative in _family(child)}:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _over(until: float, end: float) -> bool:
    """Whether the driver says by `until` that it can go on, or was ended by something else before `end`."""
    heard = select.select([0], [], [], max(until - time.monotonic(), 0))[0]
    return bool(heard) and (os.read(0, 1) == b"." or time.monotonic() < end)


def _started_by(driver: psutil.Process) -> set[psutil.Process]:
    """What the driver has started since it started this process."""
    me = psutil.Process()
    return {p for p in driver.children(recursive=True) if p != me and p.create_time() >= me.create_time()}


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


if __name__ == "__main__":
    main()
