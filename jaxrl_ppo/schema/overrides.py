"""Command lines as verl users write them, brought into the form that Hydra composes without complaint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

# Hydra's options that take the next argument.
WITH_VALUE = {"--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd", "--package", "-p", "--cfg", "-c"}
WITH_VALUE |= {"--experimental-rerun", "--info", "-i"}
FOLDERS = ("--config-path", "-cp", "--config-dir", "-cd")
# A band of two bounds, which Hydra would take for one number with _ between its digits.
BAND = re.compile(r"[\d.]+_[\d._,]+")
# How a shell hands on a value that Hydra is not to take apart.
QUOTED = "A value with such characters is quoted twice: 'KEY=\"VALUE\"'"
CLOSED_BY = {"[": "]", "{": "}", "(": ")"}
KEY_VALUE = re.compile(r"(?P<plus>\+{0,2})(?P<key>[A-Za-z_][\w.\-]*)=")


def normalise(arguments: Sequence[str], config_folder: Path) -> list[str]:
    """`arguments` with options first, every `key=value` and `+key=value` written `++key=value`, folders absolute.

    So a key may be given whether or not it exists: the schema refuses unknown ones, all at once and with the nearest
    known one, where Hydra would stop at the first; and `+` on a key that exists sets it. Hydra's own settings, choices
    of config groups (of `config_folder` and of the user's folders) and all else stay as they are.
    """
    paired = _attach_values(arguments, config_folder)
    groups = [config_folder, *(Path(argument.split("=", 1)[1]) for argument in paired if argument.startswith(FOLDERS))]
    return [_override(argument, groups) for argument in paired]


def given_keys(overrides: Sequence[str]) -> frozenset[str]:
    """The dotted keys that Hydra's overrides set."""
    return frozenset(match["key"] for text in overrides if (match := KEY_VALUE.match(text)))


def flaw(argument: str, said: str) -> str:
    """What is wrong with an argument that Hydra cannot read; where that is not plain, what Hydra `said` of it."""
    key, equals, value = argument.partition("=")
    if not equals:
        return "is no setting: one is KEY=VALUE, with no space on either side of the ="
    if not key.strip():
        return "has no key: a setting is KEY=VALUE, with no space on either side of the ="
    if wrong := _unbalanced(value):
        return f"{wrong}. {QUOTED}"
    if re.search(r",\s*[\]})]", value):
        return "there is a comma with nothing after it"
    if "=" in value:
        return f"there is a second =. {QUOTED}"
    return f"Hydra cannot read it: {said}. {QUOTED}"


def _unbalanced(value: str) -> str | None:
    """Which bracket or quote of `value` has no other, in words."""
    still_open: list[str] = []
    quote = ""
    for character in re.sub(r"\\.", "", value):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in CLOSED_BY:
            still_open.append(character)
        elif character in CLOSED_BY.values():
            if not still_open:
                return f"a {character} closes nothing"
            if CLOSED_BY[last := still_open.pop()] != character:
                return f"a {last} is closed by {character}"
    if quote:
        return f"the quote {quote} is not closed"
    return f"the {still_open[-1]} is not closed" if still_open else None


def _attach_values(arguments: Sequence[str], config_folder: Path) -> list[str]:
    """`--config-name x` as `--config-name=x`; relative folders as absolute ones, as a shell user means them.

    verl's recipes say --config-path=config and mean verl's own tree: ours, where the user has no such folder.
    """
    paired: list[str] = []
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if argument in WITH_VALUE and pending and "=" not in pending[0]:
            argument = f"{argument}={pending.pop(0)}"
        name, _, value = argument.partition("=")
        if name in FOLDERS and value:
            folders = [folder for folder in (Path(value), config_folder.parent / value) if folder.is_dir()]
            argument = f"{name}={folders[0].resolve()}" if folders else argument
        paired.append(argument)
    return sorted(paired, key=lambda argument: not argument.startswith("-"))


def _override(argument: str, groups: Sequence[Path]) -> str:
    match = KEY_VALUE.match(argument)
    if match is None or match["key"].startswith("hydra."):
        return argument
    key, value = match["key"], argument[match.end() :]
    if "." not in key and any((folder / key).is_dir() for folder in groups):
        return argument  # chooses a file of a config group
    if key.endswith("_threshold") and BAND.fullmatch(value):
        value = f"'{value}'"
    return f"++{key}={value}"
