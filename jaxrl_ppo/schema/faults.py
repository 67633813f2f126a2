"""What is wrong with a configuration: faults, collected and raised together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong. `keys` are the full paths of the keys it is about, `message` is what the user reads."""

    keys: tuple[str, ...]
    message: str


class ConfigError(ValueError):
    """A configuration that cannot be run; its text lists every fault, one a line."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__("\n  - ".join([f"{count} in the configuration:", *(fault.message for fault in faults)]))


def show(value: Any) -> str:
    """`value` as one writes it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    return str(value)
