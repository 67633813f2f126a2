"""The run folder at `trainer.default_local_dir`: configuration, metrics per step, timeline, samples."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_ppo.observability.files import json_line, read_json_lines, write_atomically

PREVIOUS = "previous"


class RunFolder:
    """One run's files. Checkpoints (`global_step_N/`) lie beside them and are not touched here.

    Call `start` once before anything is written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.timeline = self.path / "timeline.json"
        self.samples = self.path / "samples"
        self._last_step: int | None = None

    def start(self, *, config_yaml: str, resume_step: int | None) -> Path | None:
        """Make the folder ready for a run whose next step is `resume_step` + 1.

        With a step, whatever a killed process wrote about later steps is dropped, so that no step appears twice. With
        None the run starts from nothing: an older run's files move to `previous-1/`, `previous-2/` and so on.

        Returns the folder that they moved to, if there were any. Raises OSError naming the folder when it cannot be
        made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"trainer.default_local_dir={self.path}: cannot be made ({error.strerror})") from error
        previous = None
        if resume_step is None:
            previous = self._set_aside()
        else:
            self._drop_after(resume_step)
        self.samples.mkdir(exist_ok=True)
        write_atomically(self.config, config_yaml)
        return previous

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add one step's metrics; a step that is already there is merged with them, the newer value winning.

        Values that are not finite are written as null. The line has reached the operating system when this returns,
        so a killed process loses nothing.
        """
        row = {"step": step, **metrics, "step": step}  # noqa: F601 - first in the line, and no metric can change it
        if self._last_step is not None and step <= self._last_step:
            rows = {old["step"]: old for old in read_json_lines(self.metrics)}
            rows[step] = {**rows.get(step, {}), **row}
            write_atomically(self.metrics, "".join(json_line(rows[number]) for number in sorted(rows)))
            return
        with self.metrics.open("ab") as file:
            file.write(json_line(row).encode())
        self._last_step = step

    def _drop_after(self, step: int) -> None:
        rows = [row for row in read_json_lines(self.metrics) if row["step"] <= step]
        if rows or self.metrics.exists():
            write_atomically(self.metrics, "".join(map(json_line, rows)))
        self._last_step = rows[-1]["step"] if rows else None

    def _set_aside(self) -> Path | None:
        old = [path for path in (self.config, self.metrics, self.timeline, self.samples) if path.exists()]
        old += self.path.glob("timeline-*.json")
        if not any(path.exists() for path in (self.metrics, self.timeline)):
            return None
        number = next(n for n in itertools.count(1) if not (self.path / f"{PREVIOUS}-{n}").exists())
        previous = self.path / f"{PREVIOUS}-{number}"
        previous.mkdir()
        for path in old:
            path.rename(previous / path.name)
        return previous


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The metrics of the run in folder `path`, one dict a step, in order; [] when it has none yet."""
    return read_json_lines(RunFolder(path).metrics)


def obstacle(path: str | Path) -> str | None:
    """Why a run folder cannot be made at `path`, or cannot be written there; None where it can.

    It is tried, with a folder that is removed at once: permissions alone do not tell, least of all to root.
    """
    path = Path(path).absolute()
    there = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not there.is_dir():
        return f"cannot be made: {there} is in the way, and is no folder"
    what = f"cannot be {'written' if there == path else 'made'}"
    try:
        Path(tempfile.mkdtemp(prefix=".tried-", dir=there)).rmdir()
    except PermissionError:
        return f"{what}: this user may not write to {there}"
    except OSError as error:
        return f"{what}: {there} takes no new folder ({error.strerror})"
    return None
