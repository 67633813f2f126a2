"""python -m jaxrl_ppo.schema.reference [FOLDER]: writes docs/configuration.md and docs/verl_keys.md from the schema."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from jaxrl_ppo.schema.availability import MISSING, Missing, is_missing
from jaxrl_ppo.schema.coerce import default_of, type_name, walk
from jaxrl_ppo.schema.faults import show
from jaxrl_ppo.schema.keys import KeyInfo
from jaxrl_ppo.schema.legacy import REWARD_SPELLINGS, SPELLINGS
from jaxrl_ppo.schema.no_effect import CONDITIONAL, FOREIGN

COMMAND = "python -m jaxrl_ppo.schema.reference"
NOTE = f"Written by `{COMMAND}`; edit the schema, not this page."


def configuration() -> str:
    """Every key with its meaning, default and allowed values, section by section."""
    lines = [
        "# Configuration reference",
        "",
        NOTE,
        "",
        "Names and defaults are verl's where verl has the key. Keys marked with a dagger (†) are not built yet: other",
        "values than those named in [verl_keys.md](verl_keys.md) are refused at start.",
    ]
    section = None
    for path, hint, info in walk():
        parent, _, name = path.rpartition(".")
        if parent != section:
            section = parent
            lines += ["", f"## {section}", "", "| key | default | values | meaning |", "|---|---|---|---|"]
        dagger = " †" if is_missing(path) else ""
        cells = [f"`{name}`{dagger}", f"`{show(default_of(path))}`", _values(hint, info), info.doc]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _values(hint: object, info: KeyInfo) -> str:
    if info.choices:
        own = ", or `file.py:name`" if info.user_code else ""
        return ", ".join(f"`{show(choice)}`" for choice in info.choices) + own
    named = ((">=", info.ge), (">", info.gt), ("<=", info.le), ("<", info.lt))
    bounds = " and ".join(f"{sign} {bound:g}" for sign, bound in named if bound is not None)
    return type_name(hint) + (f", {bounds}" if bounds else "") + (", or -1" if info.or_minus_one else "")


def verl_keys() -> str:
    """What becomes of verl's keys that are not simply the same key here."""
    lines = [
        "# verl's keys, one by one",
        "",
        NOTE,
        "",
        "A key that is on none of these lists means here what it means in verl: [configuration.md](configuration.md).",
        "",
        "## Read under another name",
        "",
        "| verl | here |",
        "|---|---|",
    ]
    lines += [f"| `{old}` | `{new}` |" for old, new in {**SPELLINGS, **REWARD_SPELLINGS}.items()]
    lines += ["", "## Accepted, without an effect", "", "| key | why |", "|---|---|"]
    lines += [f"| `{key}` | {why} |" for key, why in FOREIGN.items()]
    lines += [f"| `{key}`, in some configurations | {why} |" for key, (_, why) in CONDITIONAL.items()]
    lines += ["", "## Not built yet", "", "| key | what is missing | values that work |", "|---|---|---|"]
    lines += [f"| `{entry.key}` | {entry.what} | {_working(entry)} |" for entry in MISSING]
    lines += ["", "## Ours, not verl's", "", "| key | meaning |", "|---|---|"]
    lines += [f"| `{path}` | {info.doc} |" for path, _, info in walk() if _is_ours(path)]
    return "\n".join(lines) + "\n"


def _working(entry: Missing) -> str:
    if entry.values:
        return "all but " + ", ".join(f"`{show(value)}`" for value in entry.values)
    return ", ".join(f"`{show(value)}`" for value in entry.only)


# Sections and keys that verl has not; the tree itself cannot tell.
OURS = (
    "actor_rollout_ref.actor.mesh",
    "actor_rollout_ref.actor.prefix_sharing",
    "actor_rollout_ref.actor.log_prob_chunk_size",
    "actor_rollout_ref.rollout.device",
    "actor_rollout_ref.rollout.cpu_affinity",
    "actor_rollout_ref.rollout.multi_turn.tool_timeout_s",
    "data.system_prompt",
    "data.train_files_weights",
    "reward.timeout_s",
    "reward.worker_memory_mb",
    "reward.max_failure_rate",
    "reward.functions",
    "reward.run_code_locally",
    "reward.reward_model.weight",
    "trainer.mode",
    "trainer.device",
    "trainer.dry_run",
    "trainer.cpu_affinity",
    "trainer.compilation_cache_dir",
    "trainer.max_consecutive_skips",
    "trainer.deadlines",
)


def _is_ours(path: str) -> bool:
    return any(path == own or path.startswith(own + ".") for own in OURS)


def pages() -> Iterator[tuple[str, str]]:
    """(file name, text) of every page."""
    yield "configuration.md", configuration()
    yield "verl_keys.md", verl_keys()


def main() -> None:
    """Write the pages."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
