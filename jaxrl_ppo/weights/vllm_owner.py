"""Keeps vLLM's processes from outliving the process that started them, however that one ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import psutil

VARIABLE = "JAXRL_PPO_ENGINE_OWNER"


def claim() -> None:
    """Make this process the owner of the engines that it starts from now on."""
    me = psutil.Process()
    os.environ[VARIABLE] = f"{me.pid}:{me.create_time()}"


def watch() -> None:
    """In a vLLM worker: kill it, and the engine core above it, once the owner is gone.

    vLLM's core does not notice when its client is killed, and would keep the device's memory for ever.
    """
    owner = os.environ.get(VARIABLE)
    if owner is None or int(owner.split(":")[0]) == os.getpid():
        return
    # Now, since a core that is gone by then has left this process to another parent.
    core = psutil.Process(os.getppid())
    threading.Thread(target=_watch, args=(owner, core), name="die-with-owner", daemon=True).start()


def _watch(owner: str, core: psutil.Process) -> None:
    pid, created = owner.split(":")
    try:
        process = psutil.Process(int(pid))
        if process.create_time() == float(created):
            process.wait()
    except psutil.NoSuchProcess:
        pass
    if core.pid not in (1, int(pid)):  # with one worker, vLLM may run it inside the core
        with contextlib.suppress(psutil.NoSuchProcess):
            core.kill()
    os.kill(os.getpid(), signal.SIGKILL)
