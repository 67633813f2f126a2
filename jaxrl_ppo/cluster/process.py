"""What every process of a run does first."""

from __future__ import annotations

import os
from collections.abc import Sequence


def enter(folder: str, cores: Sequence[int] | None = None) -> None:
    """Work in the driver's `folder`, which relative paths start from, where this host has it; pin to `cores`, if any.

    Must come before JAX or torch are imported: they count the cores that they may use for their threads.
    """
    if os.path.isdir(folder):
        os.chdir(folder)
    if cores:
        os.sched_setaffinity(0, cores)
