"""The run's one observer: files, timeline, trackers and the driver's console all hear of a step through it."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_ppo.observability.run_folder import RunFolder, read_metrics
from jaxrl_ppo.observability.samples import SampleWriter, choose_generations, dump_generations
from jaxrl_ppo.observability.timeline import Timeline
from jaxrl_ppo.observability.trackers import TrackedRun, Trackers

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import TrainerConfig
    from jaxrl_ppo.schema.records import Batch, Prompt, Sample

# What may go wrong without ending the run; how often it did in a step is its metric fault/<name>.
FAULTS = (
    "replica_failed",
    "replica_replaced",
    "replacement_failed",
    "replica_given_up",
    "store_lost",
    "rewards_failed",
    "reward_worker_lost",
    "reward_model_failed",
)

Event = tuple[Any, ...]  # the name of a Console method and its arguments

VAL_ONLY = "val_only"  # in the run folder: what a run with trainer.val_only=true writes


class RunObserver:
    """Writes the run folder and feeds the trackers; `tell` gets what the console shows, as (method, *arguments)."""

    def __init__(
        self,
        settings: TrainerConfig,
        *,
        config: Mapping[str, Any],
        config_yaml: str,
        resume_step: int | None,
        decode: Callable[[Sequence[int]], str],
        tell: Callable[[Event], None],
    ):
        """`config` is for the trackers, `config_yaml` for the folder. Raises TrackerError for a tracker that fails."""
        root = Path(settings.default_local_dir)
        if settings.val_only:  # a record of its own: that of the training which made the weights stays as it is
            root, resume_step = root / VAL_ONLY, None
        self._settings, self._decode, self._tell = settings, decode, tell
        self.folder = RunFolder(root)
        previous = self.folder.start(config_yaml=config_yaml, resume_step=resume_step)
        if previous is not None and not settings.val_only:
            tell(("note", f"no checkpoint to go on from: step 1 is next; what an older run wrote is in {previous}"))
        self._timeline = Timeline(root / "timeline.json", resume_step=resume_step)
        self._faults: collections.Counter[str] = collections.Counter()
        self._writer = SampleWriter(root / "samples", decode)
        if resume_step is not None:
            self._writer.drop_after(resume_step)
        run = TrackedRun(
            project=settings.project_name,
            experiment=settings.experiment_name,
            folder=root,
            config=config,
            resume_step=resume_step,
        )
        self._trackers = Trackers([name for name in settings.logger if name != "console"], run, self.warn)

    def span(self, name: str, *, track: str, step: int, **args: Any) -> AbstractContextManager[None]:
        """Time a phase on the timeline."""
        return self._timeline.span(name, step=step, track=track, **args)

    def event(self, name: str, start: float, end: float, *, track: str, step: int) -> None:
        """A phase on the timeline, from `start` to `end` in seconds since the epoch."""
        self._timeline.event(name, start, end, track=track, step=step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One finished step; how the pools used its time is added to its metrics."""
        now = time.time()
        faults = {f"fault/{name}": float(self._faults[name]) for name in FAULTS}
        self._faults.clear()
        metrics = {**metrics, **faults, **self._timeline.pool_metrics(now - metrics["timing_s/step"], now)}
        metrics |= self._timeline.overlap_metrics(step)
        self.folder.write_metrics(step, metrics)
        self._timeline.flush()
        self._trackers.log(metrics, step)
        self._tell(("step", step, dict(metrics)))

    def validation(
        self, step: int, prompts: Sequence[Prompt], samples: Sequence[Sample], metrics: Mapping[str, float]
    ) -> None:
        """One finished validation; `prompts[i]` is the question of `samples[i]`."""
        self._writer.write_validation(step, prompts, samples)
        if self._settings.validation_data_dir:
            dump_generations(self._settings.validation_data_dir, step, prompts, samples, self._decode)
        if self._settings.log_val_generations:
            rows = [(self._decode(p.token_ids), s.text or "", s.reward or 0.0) for p, s in zip(prompts, samples)]
            self._trackers.log_generations(choose_generations(rows, self._settings.log_val_generations), step)
        if step == 0 or self._settings.val_only:  # validations after a step are among that step's metrics
            self.folder.write_metrics(step, metrics)
            self._trackers.log(metrics, step)
        self._tell(("validation", step, dict(metrics)))

    def rollout(self, step: int, batch: Batch, samples: Sequence[Sample]) -> None:
        """The samples that a step trained on, in the order of the batch's rows."""
        self._writer.write_rollout(step, batch, samples)
        if self._settings.rollout_data_dir:
            prompts = [batch.prompts[group] for group in batch.group]
            dump_generations(self._settings.rollout_data_dir, step, prompts, samples, self._decode)

    def warn(self, message: str) -> None:
        """Something a person should know that does not end the run."""
        self._tell(("warning", message))

    def fault(self, name: str, message: str, **args: Any) -> None:
        """One of FAULTS happened and was dealt with: a metric of the step under way, a mark, a line."""
        self._faults[name] += 1
        self._timeline.instant(name, message=message, **args)
        self._tell(("fault", message))

    def finish(self, *, succeeded: bool) -> None:
        """Write everything out; after a run that succeeded, say what became of the validation scores."""
        self._timeline.flush()
        self._trackers.finish(succeeded=succeeded)
        if succeeded:
            rows = read_metrics(self.folder.path)
            validations = [row for row in rows if any("/mean@" in name for name in row)]
            before, after = (validations[0], validations[-1]) if len(validations) > 1 else ({}, {})
            in_steps = sum(row.get("timing_s/step") or 0.0 for row in rows)
            self._tell(("summary", before, after, str(self.folder.path), in_steps))
