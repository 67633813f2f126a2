"""What is wrong with a configuration: faults, collected and raised together."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import Config


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong. `keys` are the full paths of the keys it is about, `message` is what the user reads."""

    keys: tuple[str, ...]
    message: str

    def __post_init__(self) -> None:
        text = trimmed(self.message)
        object.__setattr__(self, "message", text if text.endswith(("?", "!")) else f"{text}.")


class ConfigError(ValueError):
    """A configuration that cannot be run; its text lists every fault, one a line.

    `config` is what could be read of it, keys that are at fault at their defaults: good for finding further faults.
    """

    def __init__(self, faults: Sequence[Fault], config: Config | None = None) -> None:
        self.faults = tuple(faults)
        self.config = config
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__("\n  - ".join([f"{count} in the configuration:", *(fault.message for fault in faults)]))


def named(key: str, text: object) -> str:
    """'KEY: TEXT'; a text (an error, say) that begins with the key, one below or one beside it, is left as it is."""
    section = key.rpartition(".")[0]
    beside = rf"|{re.escape(section)}\." if "." in section else ""  # data.x may be a file, a.b.x is a key
    return str(text) if re.match(rf"{re.escape(key)}(?!\w){beside}", str(text)) else f"{key}: {text}"


def trimmed(text: object) -> str:
    """A text (another library's error, say) without the full stop at its end, so that a sentence can go on after it."""
    return str(text).rstrip(". \n")


def show(value: Any) -> str:
    """`value` as one writes it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    return str(value)
