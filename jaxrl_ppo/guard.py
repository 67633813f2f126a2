"""Ends a process that runs users' code once its parent is gone, even where that code holds the interpreter's lock."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal


def guard(parent: int) -> None:
    """End this process's group, whose leader it must be, as soon as this process or its parent is gone.

    `parent` is the reading end of a pipe whose writing end the parent alone holds. To be called before there are
    threads: a small process, forked from this one, does it.
    """
    ours, alive = os.pipe()
    if child := os.fork():
        os.close(ours)  # `alive` stays open for as long as this process lives
        os.waitpid(child, 0)
        return
    if os.fork() == 0:  # once more, so that code that waits for all its children does not wait for this one
        os.close(alive)
        gone = select.poll()
        for descriptor in (parent, ours):
            gone.register(descriptor, 0)  # the other end's closing is told always
        gone.poll()
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def guard_pool_process() -> None:
    """The same in a process of a `multiprocessing` pool, as its initializer: makes it the leader of its own group."""
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None
    guard(parent.sentinel)
