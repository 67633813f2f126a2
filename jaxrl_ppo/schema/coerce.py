"""From plain dictionaries to the schema's dataclasses: types, bounds, choices and unknown keys."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import Fault, show
from jaxrl_ppo.schema.keys import KEY, KeyInfo

MISSING = "???"  # what OmegaConf writes for a value that must be given
# What people call a choice that has another name here.
OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda", "amd": "rocm", "ascend": "npu"}
OTHER_KEYS = {"learning_rate": "lr"}  # the same of keys


class _WrongType(Exception):
    """A value does not fit a type; the text says what does."""


def to_dataclass(cls: type, raw: Mapping[str, Any], faults: list[Fault], path: str = "") -> Any:
    """Make a `cls` from `raw`. A key that is at fault keeps its default and is added to `faults`."""
    values: dict[str, Any] = {}
    known = fields_of(cls)
    for name, value in raw.items():
        full = f"{path}.{name}" if path else str(name)
        if name not in known:
            faults.append(Fault((full,), f"{full}: unknown key.{_suggest(full)}"))
            continue
        hint, info = known[name]
        if info is None:
            if isinstance(value, Mapping):
                values[name] = to_dataclass(hint, value, faults, full)
            elif value is not None:
                faults.append(Fault((full,), f"{full}={show(value)}: is a section, set its keys one by one."))
            continue
        if value == MISSING:
            faults.append(Fault((full,), f"{full} must be given: {info.doc}"))
            continue
        try:
            value = _convert(value, hint, info)
        except _WrongType as wrong:
            faults.append(Fault((full,), f"{full}={show(value)}: must be {wrong}."))
            continue
        problem = _out_of_range(value, info)
        if problem:
            faults.append(Fault((full,), f"{full}={show(value)}: must be {problem}."))
            continue
        values[name] = value
    made = cls()
    for name, value in values.items():
        setattr(made, name, value)
    return made


@functools.cache
def fields_of(cls: type) -> dict[str, tuple[Any, KeyInfo | None]]:
    """The keys of a section: name → (type, KeyInfo), or (section class, None) for a nested section."""
    hints = typing.get_type_hints(cls)
    return {f.name: (hints[f.name], f.metadata.get(KEY)) for f in dataclasses.fields(cls)}


def walk(cls: type = Config, path: str = "") -> Iterator[tuple[str, Any, KeyInfo]]:
    """Every key of the schema: (full path, type, KeyInfo)."""
    for name, (hint, info) in fields_of(cls).items():
        full = f"{path}.{name}" if path else name
        if info is None:
            yield from walk(hint, full)
        else:
            yield full, hint, info


def value_at(config: Config, path: str) -> Any:
    """The value of a key, by its full path."""
    return functools.reduce(getattr, path.split("."), config)


@functools.cache
def _defaults() -> dict[str, Any]:
    return {path: value_at(Config(), path) for path, _, _ in walk()}


def default_of(path: str) -> Any:
    """The schema's default of a key; None for a path that is no key. Not to be changed in place."""
    return _defaults().get(path)


def _suggest(path: str) -> str:
    """' Did you mean …?' for an unknown key; empty when nothing is near."""
    parent, _, name = path.rpartition(".")
    paths = [full for full, _, _ in walk()]
    sections = {full.rsplit(".", depth)[0] for full in paths for depth in range(1, full.count(".") + 1)}
    every = [*paths, *sorted(sections)]
    siblings = {full.removeprefix(parent + ".").split(".")[0] for full in paths if full.startswith(parent + ".")}
    close = [full for full in every if full.rpartition(".")[2] == name][:4]
    if not close:
        names = sorted(siblings if parent else {full.split(".")[0] for full in paths})
        words = set(name.split("_"))
        longer = [other for other in names if words < set(other.split("_"))]  # total_steps: total_training_steps
        near = longer if len(longer) == 1 else difflib.get_close_matches(OTHER_KEYS.get(name, name), names, n=1)
        close = [f"{parent}.{near[0]}" if parent else near[0]] if near else []
    close = close or difflib.get_close_matches(path, every, n=1, cutoff=0.75)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _convert(value: Any, hint: Any, info: KeyInfo) -> Any:
    """`value` as the type `hint`; raises _WrongType. An integral float passes for an int, a number for text."""
    if hint is Any:
        return value
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        options = typing.get_args(hint)
        for option in sorted(options, key=lambda option: type(value) is not option):  # the exact type first
            try:
                return _convert(value, option, info)
            except _WrongType:
                continue
        raise _WrongType(" or ".join(type_name(option) for option in options))
    if hint is types.NoneType:
        if value is None:
            return None
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif hint is str:
        if isinstance(value, str):
            return value
        if isinstance(value, bool) and show(value) in info.choices:
            return show(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    elif typing.get_origin(hint) is list:
        if isinstance(value, list | tuple):
            return [_convert(item, typing.get_args(hint)[0], info) for item in value]
        if isinstance(value, str) and typing.get_args(hint)[0] is str:
            return [value]  # verl recipes write trainer.logger=console
    elif typing.get_origin(hint) is dict and isinstance(value, Mapping):
        return dict(value)
    raise _WrongType(type_name(hint))


def type_name(hint: Any) -> str:
    """A type in plain words."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(type_name(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"a list, each item {type_name(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        return "a mapping"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
    return names[hint]


def _out_of_range(value: Any, info: KeyInfo) -> str | None:
    """What is allowed, in words, when `value` is not; None when it is."""
    if value is None or isinstance(value, dict):
        return None
    if isinstance(value, list):
        problems = [_out_of_range(item, info) for item in value]
        return next((f"a list whose items are each {problem}" for problem in problems if problem), None)
    if info.choices and value not in info.choices and not (info.user_code and ".py:" in str(value)):
        own = ", or your own as path/to/file.py:name" if info.user_code else ""
        names = [str(choice) for choice in info.choices]
        meant = OTHER_NAMES.get(str(value))
        near = [meant] if meant in names else difflib.get_close_matches(str(value), names, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return "one of " + ", ".join(show(choice) for choice in info.choices) + own + hint
    if not isinstance(value, int | float) or (info.or_minus_one and value == -1):
        return None
    within = (
        math.isfinite(value)
        and (info.ge is None or value >= info.ge)
        and (info.gt is None or value > info.gt)
        and (info.le is None or value <= info.le)
        and (info.lt is None or value < info.lt)
    )
    return None if within else _bounds(info)


def _bounds(info: KeyInfo) -> str:
    """The allowed interval in words."""
    named = (("at least", info.ge), ("more than", info.gt), ("at most", info.le), ("less than", info.lt))
    words = " and ".join(f"{word} {bound:g}" for word, bound in named if bound is not None) or "finite"
    return words + (", or -1" if info.or_minus_one else "")
