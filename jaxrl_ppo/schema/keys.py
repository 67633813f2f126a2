"""How a configuration key is declared: default, meaning and allowed values, in one line of a dataclass."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

KEY = "jaxrl_ppo.key"


@dataclasses.dataclass(frozen=True, slots=True)
class KeyInfo:
    """What a key means and which values it takes. Bounds and choices also hold for every item of a list.

    `ge`, `gt`, `le`, `lt` are numeric bounds. `or_minus_one` allows -1 besides the bounds ("off" or "all" in verl).
    `user_code` allows a user's own function, written `path/to/file.py:name`, besides the choices.
    """

    doc: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    or_minus_one: bool = False
    choices: tuple[Any, ...] = ()
    user_code: bool = False


def key(default: Any, doc: str, **rules: Any) -> Any:
    """Declare one key. `rules` are KeyInfo's other fields. A list or dict default is copied per instance."""
    info = KeyInfo(doc, **rules)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata={KEY: info})
    return dataclasses.field(default=default, metadata={KEY: info})


def section(cls: type, **defaults: Any) -> Any:
    """Declare a nested section, with other defaults than its class's own where `defaults` says so."""
    return dataclasses.field(default_factory=lambda: cls(**defaults))
