"""One scenario of the fault campaign: the runs that it starts, and the verdict on what they left."""

from __future__ import annotations

import dataclasses
import random
import tempfile
import zlib
from pathlib import Path

from fault_checks import faults, lost_prompts, silent_errors, trained, unlike
from fault_runs import Run

STEPS = 24  # of a run in which something other than the driver is hurt
SHORT = 6  # of a run whose driver is killed


@dataclasses.dataclass(frozen=True)
class Mode:
    """Settings of a pipeline mode, how old its samples may be, and whether it is the same every time."""

    settings: tuple[str, ...]
    staleness: int
    exact: bool = True


ONE_STEP_OFF = Mode(("trainer.mode=one_step_off",), 1)
MODES = {
    "sync": Mode(("trainer.mode=sync",), 0),
    "sync, in turns": Mode(("trainer.mode=sync", "actor_rollout_ref.hybrid_engine=true"), 0),
    "one-step-off": ONE_STEP_OFF,
    "async, drained": Mode(
        ("trainer.mode=async", "async_training.max_staleness=1", "async_training.partial_rollout=false"), 1
    ),
    "async(4)": Mode(
        (
            "trainer.mode=async",
            "async_training.max_staleness=4",
            "actor_rollout_ref.rollout.over_sample_rate=2",
        ),
        4,
        exact=False,
    ),
}


@dataclasses.dataclass
class Verdict:
    """What became of a scenario's runs: faults injected, runs that ended properly or stopped with the right cause, and
    what must not be."""

    injected: int = 0
    ended: int = 0
    stopped: int = 0
    hangs: int = 0
    lost_prompts: int = 0
    silent_errors: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)

    def blame(self, kind: str, found: list[str]) -> None:
        """Count what was found, and keep the first of it."""
        setattr(self, kind, getattr(self, kind) + len(found))
        self.notes += [text[:600] for text in found[:4]]


class Scenario:
    """One scenario's runs, in folders of their own under `base`, and the verdict on them."""

    def __init__(self, base: Path, rng: random.Random):
        self.base, self.rng = base, rng
        self.verdict = Verdict()
        self._runs: list[Run] = []

    def run(self, mode: Mode, steps: int, *more: str) -> Run:
        """A run that is not started yet."""
        settings = (*mode.settings, f"trainer.total_training_steps={steps}", *more)
        run = Run(self.base, Path(tempfile.mkdtemp(dir=self.base)) / "run", settings, self.rng)
        self._runs.append(run)
        return run

    def close(self) -> None:
        """End what still runs."""
        for run in self._runs:
            if run.alive:
                run.kill()

    def hurt(self, done: bool) -> bool:
        """Count a fault, if it could be injected: not once the run has ended."""
        self.verdict.injected += done
        return done

    def stops(self, run: Run, code: int, cause: str) -> None:
        """Wait for a run that has to stop with exit status `code` and say `cause`."""
        found = run.end()
        if found == code and cause in run.output:
            self.verdict.stopped += 1
        else:
            self.verdict.blame("silent_errors", [f"ended with {found}, not {cause!r}: {run.output[-400:]}"])

    def ends(self, run: Run, mode: Mode, steps: int, *, visible: tuple[str, ...] = (), exact: bool = False) -> None:
        """Wait for a run that has to end properly, and look at what it left.

        `visible` are metrics of which the faults make as many as were injected; `exact`, whether everything must be as
        in an undisturbed run.
        """
        verdict = self.verdict
        if code := run.end():
            verdict.blame("silent_errors", [f"exit status {code}: {run.output[-600:]}"])
            return
        verdict.ended += 1
        rows = trained(run.folder)
        verdict.blame("lost_prompts", lost_prompts(rows, steps, in_order=mode.exact))
        verdict.blame("silent_errors", silent_errors(run.folder, rows, steps, staleness=mode.staleness))
        verdict.blame("silent_errors", run.leftovers())
        seen = faults(run.folder)
        verdict.notes.append(f"seen: {seen}")
        if visible and sum(seen.get(name, 0) for name in visible) < verdict.injected:
            verdict.blame("silent_errors", [f"{verdict.injected} faults, and in the metrics only {seen}"])
        if exact:
            verdict.blame("silent_errors", unlike(run.folder, self._undisturbed(run.settings, steps), steps))

    def _undisturbed(self, settings: tuple[str, ...], steps: int) -> Path:
        """The folder of a run of the same settings that nobody hurt, made when it is first needed."""
        name = f"undisturbed-{zlib.crc32(repr(settings).encode()):08x}"
        run = Run(self.base, self.base / name, settings, self.rng)
        if not (run.folder / f"global_step_{steps}" / "COMMITTED").exists():
            run.start()
            if run.end():
                raise RuntimeError(run.output[-2000:])
        return run.folder
