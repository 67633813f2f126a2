"""What the doctor finds: fine, worth knowing, or a problem with its remedy."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """`what` is the case; `remedy` is what to do about it."""

    level: Literal["ok", "note", "problem"]
    what: str
    remedy: str | None = None

    def __str__(self) -> str:
        first = f"{self.level:<8} {self.what}"
        return first if self.remedy is None else f"{first}\n{'':<9}→ {self.remedy}"


def ok(what: str) -> Finding:
    """All is well."""
    return Finding("ok", what)


def note(what: str, remedy: str | None = None) -> Finding:
    """Nothing that stops a run."""
    return Finding("note", what, remedy)


def problem(what: str, remedy: str) -> Finding:
    """Something that stops a run, or spoils it."""
    return Finding("problem", what, remedy)


def looking(what: str) -> None:
    """Say what a slow check is about before it, beside the findings: on stderr, so that stdout holds those alone."""
    print(f"looking: {what}", file=sys.stderr, flush=True)


def try_in_child(script: str, environment: Mapping[str, str], *, about: str, seconds: float) -> tuple[bool, str]:
    """Run a Python script in a process of its own, so that what it imports cannot hurt this one.

    `about` tells the person who waits what it tries. Returns whether it succeeded, and the last line it printed (of its
    errors, when it failed).
    """
    looking(f"{about} (at most {seconds:.0f} s)")
    try:
        child = subprocess.run(
            [sys.executable, "-c", script], env=dict(environment), capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {seconds:.0f} s"
    said = (child.stdout if child.returncode == 0 else child.stderr or child.stdout).strip().splitlines()
    return child.returncode == 0, said[-1] if said else f"ended with status {child.returncode}"
