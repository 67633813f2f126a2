"""The run in the terminal: a progress bar with the time left, one line a step, faults, and a closing summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

# What one line shows of a step: label, metric, format. In one run all lines have the same columns: the first ones, and
# those of the others that its first step has. A metric that a step does not have is a dash.
ALWAYS = ("reward", "length", "kl", "grad", "stale")
STEP_COLUMNS = (
    ("reward", "critic/score/mean", "{:7.3f}"),
    ("length", "response_length/mean", "{:4.0f}"),
    ("turns", "num_turns/mean", "{:4.1f}"),
    ("kl", "actor/ppo_kl", "{:+8.1e}"),
    ("ref kl", "actor/kl_loss", "{:8.1e}"),
    ("entropy", "actor/entropy", "{:5.2f}"),
    ("grad", "actor/grad_norm", "{:6.2f}"),
    ("stale", "training/staleness", "{:.0f}"),
)
TRAIN_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


class Console:
    """Prints to `stream` (standard output unless given). On a terminal it keeps a progress bar under the lines.

    `steps` is False when `trainer.logger` does not name "console": then only the bar, faults and the summary show.
    """

    def __init__(
        self, *, total_steps: int, start_step: int = 0, steps: bool = True, stream: TextIO | None = None
    ) -> None:
        self._rich = RichConsole(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._total = total_steps
        self._show_steps = steps
        self._start_step = start_step
        self._columns: tuple[str, ...] | None = None
        self._started = time.monotonic()
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._rich,
            disable=not self._rich.is_terminal,
        )
        self._task = self._progress.add_task("training", total=total_steps, completed=start_step, note="")

    def __enter__(self) -> Console:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, text: str) -> None:
        """Say beside the bar what is going on now; shown on a terminal only."""
        self._progress.update(self._task, note=text)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line about a finished step, and the bar moved on."""
        self._progress.update(self._task, completed=step)
        if self._show_steps:
            if self._columns is None:
                self._columns = tuple(label for label, name, _ in STEP_COLUMNS if label in ALWAYS or name in metrics)
            left = "" if self._rich.is_terminal else f"  {_left(self._seconds_left(step))}"
            line = step_line(metrics, self._columns)
            self._rich.print(Text(f"step {step:>{len(str(self._total))}}/{self._total}  {line}{left}".rstrip()))

    def validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line about a validation."""
        self._rich.print(Text(f"validation at step {step}: {validation_line(metrics)}", style="cyan"))

    def note(self, text: str) -> None:
        """A plain line."""
        self._rich.print(Text(text))

    def warning(self, text: str) -> None:
        """Something a person should know of; the run goes on unharmed."""
        self._rich.print(Text(f"warning: {text}", style="yellow"))

    def fault(self, text: str) -> None:
        """Something broke and was dealt with, or ends the run: a dead replica, a failed reward."""
        self._rich.print(Text(f"fault: {text}", style="bold red"))

    def summary(
        self, before: Mapping[str, Any], after: Mapping[str, Any], folder: str | Path, seconds_in_steps: float
    ) -> None:
        """Close the run: each validation mean before and after, the time taken, where the run folder is.

        `seconds_in_steps` is that of all steps, those before a resume included.
        """
        self._progress.stop()
        for name, old, new in validation_change(before, after):
            self._rich.print(Text(f"{name}: {old:.3f} before, {new:.3f} after training", style="bold"))
        seconds = time.monotonic() - self._started
        took = f"finished in {seconds:.0f} s"
        if self._start_step and seconds_in_steps:  # not where it has validated and made no step
            took += f" since step {self._start_step}; all {self._total} steps took {seconds_in_steps:.0f} s"
        self._rich.print(Text(f"{took}; metrics, timeline, samples, checkpoints: {folder}"))

    def _seconds_left(self, step: int) -> float | None:
        done = step - self._start_step
        return (time.monotonic() - self._started) / done * (self._total - step) if done > 0 else None


def step_line(metrics: Mapping[str, Any], columns: Collection[str]) -> str:
    """The readable half of a step's metrics, as one line of these columns."""
    parts = []
    for label, name, form in STEP_COLUMNS:
        if label in columns:
            value = metrics.get(name)
            width = len(form.format(0.0))
            parts.append(f"{label} {'-'.rjust(width) if value is None else form.format(value)}")
    if "timing_s/step" in metrics:
        parts.append(f"{metrics['timing_s/step']:5.1f} s ({_split(metrics)})")
    idle = [(pool, metrics.get(f"perf/idle_share/{pool}")) for pool in ("trainer", "rollout")]
    if any(share is not None for _, share in idle):
        parts.append("idle " + ", ".join(f"{pool} {share:.0%}" for pool, share in idle if share is not None))
    return "  ".join(parts)


def _split(metrics: Mapping[str, Any]) -> str:
    """Where a step's time went. What of its generation ran beside the training before is told apart: those seconds
    are not the step's, so with them the parts would be more than it."""
    train = sum(metrics.get(f"timing_s/{phase}", 0.0) for phase in TRAIN_PHASES)
    parts = []
    if (generated := metrics.get("timing_s/gen")) is not None:
        beside = metrics.get("perf/generation_overlapped_s", 0.0)
        apart = f" and {beside:.1f} beside the training before" if beside >= 0.05 else ""
        parts.append(f"gen {generated - beside:.1f}{apart}")
    parts.append(f"train {train:.1f}")
    if (sync := metrics.get("timing_s/update_weights")) is not None:
        parts.append(f"sync {sync:.1f}")
    return "; ".join(parts)


def validation_line(metrics: Mapping[str, Any]) -> str:
    """The main validation scores, as one line: for each data source its mean, and what several samples add."""
    means: dict[str, float] = {}
    further: dict[str, float] = {}
    for name, value in metrics.items():
        if name.startswith("val-core/"):
            where = further if "/mean@" not in name else means
            where[name] = value
    parts = []
    for name, value in means.items():
        source, what = _core_name(name)
        added = [
            f"{other.rpartition(source + '/')[2].partition('/')[2].removesuffix('/mean')} {number:.3f}"
            for other, number in further.items()
            if other.startswith(f"val-core/{source}/") and not other.partition("@")[0].endswith(("std", "worst"))
        ]
        parts.append(f"{source} {what} {value:.3f}" + (f" ({', '.join(added)})" if added else ""))
    return "  ".join(parts)


def _core_name(name: str) -> tuple[str, str]:
    """Data source, and what its main score is: "accuracy" where the reward function says what is right (`acc`), else
    "mean reward"; over several samples of each prompt if there are several."""
    source, kind, metric = name.removeprefix("val-core/").rsplit("/", 2)
    samples = metric.removeprefix("mean@")
    return source, ("accuracy" if kind == "acc" else "mean reward") + ("" if samples == "1" else f" of {samples}")


def validation_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """(name, before, after) of each mean score of a validation that both have."""
    return [
        (" ".join(_core_name(name)), before[name], after[name])
        for name in before
        if name.startswith("val-core/") and "/mean@" in name and name in after
    ]


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"left {hours}:{minutes:02d}:{seconds:02d}" if hours else f"left {minutes}:{seconds:02d}"
