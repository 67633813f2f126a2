"""From the composed configuration to a checked Config: the one entrance to this package."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxrl_ppo.schema import availability, legacy, no_effect, preflight, rules
from jaxrl_ppo.schema.coerce import default_of, to_dataclass, value_at, walk
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.derive import fill_in
from jaxrl_ppo.schema.faults import ConfigError, Fault


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """A configuration that can be run, and what the user should know about how it was read."""

    config: Config
    notes: tuple[str, ...]


def validate_config(
    raw: Mapping[str, Any],
    given: Collection[str] = (),
    *,
    model_types: Collection[str] | None = None,
    copies: Mapping[str, str] | None = None,
    files: bool = True,
    known: Sequence[Fault] = (),
) -> Checked:
    """Check `raw`, the resolved configuration as plain containers, and, with `files`, the files it names.

    `given` are the dotted keys set on the command line, which tell a default from the same value asked for.
    `model_types` are the architectures that can be trained; None leaves that check to the model reader.
    `copies` says which keys of `raw` took their value from which other key, whose faults are told once;
    `known` are faults of keys that `raw` lacks for them.
    Raises ConfigError listing every fault found.
    """
    tree = copy.deepcopy(dict(raw))
    faults: list[Fault] = list(known)
    notes: list[str] = []
    legacy.migrate_spellings(tree, given, faults, notes)
    legacy.migrate_legacy_reward_impl(tree, given, faults, notes)
    faults += availability.refuse_missing(tree)
    availability.drop_foreign_switches(tree)
    idle = no_effect.drop_foreign(tree)
    config = to_dataclass(Config, tree, faults)
    changed = [path for path, _, _ in walk() if path in given or value_at(config, path) != default_of(path)]
    fill_in(config)
    # These have their defaults now, whose own faults would only confuse.
    at_fault = tuple(key for fault in faults for key in fault.keys)
    found = rules.check(config) + (preflight.check(config, model_types) if files else [])
    faults += [fault for fault in found if not any(_is_within(key, at_fault) for key in fault.keys)]
    told = {key for fault in faults for key in fault.keys}
    faults = [fault for fault in faults if not all((copies or {}).get(key) in told for key in fault.keys)]
    if faults:
        raise ConfigError(faults, config)
    if files:
        notes += preflight.notes(config)
    idle += no_effect.without_effect(config, changed, given)
    if idle:
        notes.append("no effect here: " + ", ".join(idle))
    return Checked(config, tuple(notes))


def _is_within(key: str, sections: Collection[str]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)
