"""One run at a time in a run folder: a lock that goes with its process, however that ends."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from jaxrl_ppo.pipeline.checkpoints import CheckpointError

logger = logging.getLogger(__name__)

LOCK = ".lock"
WAIT_S = 60.0  # for what is left of a run that was just killed


@asynccontextmanager
async def run_lock(folder: Path, wait_s: float = WAIT_S) -> AsyncIterator[None]:
    """Hold `folder`; waits for an older run that is just ending.

    Raises CheckpointError when another run still has it after `wait_s`: two would overwrite one another's checkpoints;
    and when its lock file is none of this user's.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:  # another user's, most likely
        raise CheckpointError(
            f"trainer.default_local_dir={folder}: its file {LOCK} cannot be opened ({error.strerror}): give a folder "
            "of your own"
        ) from error
    try:
        for attempt in range(int(wait_s) + 1):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                break
            except BlockingIOError:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                if attempt == 0:
                    logger.warning(
                        "another run (%s) works in %s: waiting for its end, %g s at most", holder, folder, wait_s
                    )
                await asyncio.sleep(1)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                logger.warning("%s cannot be locked (%s): make sure that no other run uses it", folder, error.strerror)
                break
        else:
            raise CheckpointError(
                f"trainer.default_local_dir={folder} is in use by another run that still lives ({holder}): stop that "
                "one, or give this one a folder of its own"
            )
        yield
    finally:
        os.close(descriptor)
