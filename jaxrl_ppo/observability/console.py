"""The run in the terminal: a progress bar with the time left, one line a step, faults, and a closing summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

# What one line shows of a step: label, metric, format. A metric the step does not have is left out.
STEP_COLUMNS = (
    ("reward", "critic/score/mean", "{:.3f}"),
    ("length", "response_length/mean", "{:.0f}"),
    ("kl", "actor/ppo_kl", "{:+.1e}"),
    ("ref kl", "actor/kl_loss", "{:.1e}"),
    ("entropy", "actor/entropy", "{:.2f}"),
    ("grad", "actor/grad_norm", "{:.2f}"),
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
            left = "" if self._rich.is_terminal else f"  {_left(self._seconds_left(step))}"
            self._rich.print(Text(f"step {step:>{len(str(self._total))}}/{self._total}  {step_line(metrics)}{left}"))

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

    def summary(self, before: Mapping[str, Any], after: Mapping[str, Any], folder: str | Path) -> None:
        """Close the run: each validation mean before and after, seconds taken, where the run folder is."""
        self._progress.stop()
        for name, old, new in validation_change(before, after):
            self._rich.print(Text(f"{name}: {old:.3f} before, {new:.3f} after training", style="bold"))
        seconds = time.monotonic() - self._started
        self._rich.print(Text(f"finished in {seconds:.0f} s; metrics, timeline, samples, checkpoints: {folder}"))

    def _seconds_left(self, step: int) -> float | None:
        done = step - self._start_step
        return (time.monotonic() - self._started) / done * (self._total - step) if done > 0 else None


def step_line(metrics: Mapping[str, Any]) -> str:
    """The readable half of a step's metrics, as one line."""
    parts = [f"{label} {form.format(metrics[name])}" for label, name, form in STEP_COLUMNS if name in metrics]
    if "timing_s/step" in metrics:
        train = sum(metrics.get(f"timing_s/{phase}", 0.0) for phase in TRAIN_PHASES)
        split = [
            ("gen", metrics.get("timing_s/gen")),
            ("train", train),
            ("sync", metrics.get("timing_s/update_weights")),
        ]
        inside = ", ".join(f"{label} {seconds:.1f}" for label, seconds in split if seconds is not None)
        parts.append(f"{metrics['timing_s/step']:.1f} s ({inside})")
    idle = [(pool, metrics.get(f"perf/idle_share/{pool}")) for pool in ("trainer", "rollout")]
    if any(share is not None for _, share in idle):
        parts.append("idle " + ", ".join(f"{pool} {share:.0%}" for pool, share in idle if share is not None))
    means = {name: value for name, value in metrics.items() if "/mean@" in name}
    if means:
        parts.append(validation_line(means))
    return "  ".join(parts)


def validation_line(metrics: Mapping[str, Any]) -> str:
    """The main validation scores, as one line."""
    scores = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
    return "  ".join(f"{name.removeprefix('val-core/')} {value:.3f}" for name, value in scores.items())


def validation_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """(name, before, after) of each mean score of a validation that both have."""
    return [
        (name.removeprefix("val-core/"), before[name], after[name])
        for name in before
        if name.startswith("val-core/") and "/mean@" in name and name in after
    ]


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"left {hours}:{minutes:02d}:{seconds:02d}" if hours else f"left {minutes}:{seconds:02d}"
