"""What every process of a run does first."""

from __future__ import annotations

import os
from collections.abc import Sequence

CACHE_BYTES = 4 << 30  # JAX deletes the programs that were used least recently beyond this


def enter(folder: str, cores: Sequence[int] | None = None, compiled: str | None = None) -> None:
    """Work in the driver's `folder`, which relative paths start from, where this host has it; pin to `cores`, if any.

    `compiled` is a folder in which JAX keeps compiled programs for the next run; JAX's own variables come first.

    Must come before JAX or torch are imported: they count the cores that they may use for their threads.
    """
    if os.path.isdir(folder):
        os.chdir(folder)
    if cores:
        os.sched_setaffinity(0, cores)
    if compiled:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.expanduser(compiled))
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(CACHE_BYTES))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
