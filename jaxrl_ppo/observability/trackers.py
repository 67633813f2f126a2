"""Experiment trackers named by `trainer.logger`: each fed from a thread of its own, so that none can stop the run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from device import pip_install
from jaxrl_ppo.observability.files import plain, write_atomically

BACKLOG = 1000  # calls waiting for a tracker; more are dropped and counted
FINISH_SECONDS = 120.0
CONSOLE = "console"  # in trainer.logger, but drawn by console.py

Generation = tuple[str, str, float]  # input, output, score


class TrackerError(RuntimeError):
    """A tracker that cannot be started: unknown, not installed, or refused by its own library."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told once, at start. `resume_step` is None for a run that starts from nothing."""

    project: str
    experiment: str
    config: Mapping[str, Any]
    folder: Path
    resume_step: int | None = None

    def remembered(self, name: str) -> str | None:
        """The id under which tracker `name` knows this run, if it is being resumed."""
        path = self.folder / "trackers.json"
        if self.resume_step is None or not path.exists():
            return None
        return json.loads(path.read_text()).get(name)

    def remember(self, name: str, run_id: str) -> None:
        """Keep tracker `name`'s id of this run for a later resume."""
        path = self.folder / "trackers.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        write_atomically(path, json.dumps({**known, name: run_id}))


class Tracker(Protocol):
    """One library's view of the run. Calls come from one thread, in order."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step."""
        ...

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Record a few validation answers."""
        ...

    def finish(self, succeeded: bool) -> None:
        """Write everything out and close the run."""
        ...


def check_trackers(names: Sequence[str]) -> None:
    """Raise TrackerError for every name in `trainer.logger` that is unknown or whose library is not installed."""
    faults = []
    for name in names:
        if name == CONSOLE:
            continue
        if name not in _backends():
            faults.append(f"{name!r} is not a tracker; known are {', '.join([CONSOLE, *_backends()])}")
        elif importlib.util.find_spec(name) is None:
            faults.append(f"{name!r} is not installed; run: {pip_install(name)}")
    if faults:
        raise TrackerError("trainer.logger: " + "; ".join(faults))


class Trackers:
    """All trackers of a run. A tracker that fails later loses that call: warned about once, counted in `faults`."""

    def __init__(self, names: Sequence[str], run: TrackedRun, warn: Callable[[str], None]) -> None:
        """Start each tracker; raises TrackerError naming the first that cannot start and why."""
        check_trackers(names)
        self.faults: dict[str, int] = {}
        self._warn = warn
        self._channels: list[_Channel] = []
        for name in dict.fromkeys(names):
            if name == CONSOLE:
                continue
            try:
                tracker = _backends()[name](run)
            except Exception as error:
                self.finish(succeeded=False)
                raise TrackerError(f"trainer.logger: {name} did not start: {error}") from error
            self._channels.append(_Channel(name, tracker, self._failed))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Hand the numbers among a step's metrics to every tracker; returns at once."""
        numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        for channel in self._channels:
            channel.send(lambda tracker: tracker.log(numbers, step))

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Hand a few validation answers to every tracker; returns at once."""
        for channel in self._channels:
            channel.send(lambda tracker: tracker.log_generations(generations, step))

    def finish(self, *, succeeded: bool) -> None:
        """Close every tracker, waiting for what is still on its way, at most `FINISH_SECONDS` each."""
        for channel in self._channels:
            channel.close(succeeded)
        self._channels = []

    def _failed(self, name: str, why: str) -> None:
        self.faults[name] = self.faults.get(name, 0) + 1
        if self.faults[name] == 1:
            self._warn(f"tracker {name} failed, the run goes on without what it lost: {why}")


class _Channel:
    """A tracker and the thread that calls it."""

    def __init__(self, name: str, tracker: Tracker, failed: Callable[[str, str], None]) -> None:
        self._name, self._tracker, self._failed = name, tracker, failed
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(BACKLOG)
        # A daemon: a library that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def send(self, call: Callable[[Tracker], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._failed(self._name, f"it is {BACKLOG} calls behind")

    def close(self, succeeded: bool) -> None:
        self.send(lambda tracker: tracker.finish(succeeded))
        try:
            self._calls.put(None, timeout=FINISH_SECONDS)
        except queue.Full:
            self._failed(self._name, f"it took no call for {FINISH_SECONDS:.0f} s")
            return
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            self._failed(self._name, f"it did not finish within {FINISH_SECONDS:.0f} s")

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call(self._tracker)
            except Exception as error:
                self._failed(self._name, f"{type(error).__name__}: {error}")


class TensorBoard:
    """Event files in `tensorboard/` of the run folder, or in $TENSORBOARD_DIR."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(os.environ.get("TENSORBOARD_DIR", str(run.folder / "tensorboard")))
        if run.resume_step is not None:
            # Tells TensorBoard to forget what a killed process logged about later steps.
            restart = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(session_log=restart, step=run.resume_step + 1))
        self._text("config", f"```json\n{json.dumps(plain(run.config), indent=2)}\n```", run.resume_step or 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        for number, (prompt, answer, score) in enumerate(generations):
            text = f"**input**\n\n{_fenced(prompt)}\n\n**output**\n\n{_fenced(answer)}\n\n**score** {score}"
            self._text(f"val/generations/{number}", text, step)

    def finish(self, succeeded: bool) -> None:
        self._writer.close()

    def _text(self, tag: str, text: str, step: int) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=text_pb(tag, text)))
        self._writer.flush()


class Wandb:
    """Weights & Biases; WANDB_MODE=offline keeps the run in `wandb/` of the run folder for `wandb sync`.

    A resumed run goes on under its id. Steps that a killed process had logged beyond the checkpoint stay as they were:
    wandb takes no step twice, and an exact resume gives the same numbers.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            config=plain(run.config),
            dir=str(run.folder),
            id=run.remembered("wandb"),
            resume="allow",
        )
        run.remember("wandb", self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        table = self._wandb.Table(columns=["step", "input", "output", "score"])
        for generation in generations:
            table.add_data(step, *generation)
        self._run.log({"val/generations": table}, step=step)

    def finish(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


class MLflow:
    """MLflow at $MLFLOW_TRACKING_URI, or in `mlflow.db` of the run folder. A resumed run goes on under its id."""

    PARAMETER_LIMIT, BATCH_LIMIT = 6000, 100  # of one value's characters; of parameters or metrics in one call

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run.folder.resolve()}/mlflow.db")
        self._client = MlflowClient(tracking_uri=uri)
        known = run.remembered("mlflow")
        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        artifacts = None if "MLFLOW_TRACKING_URI" in os.environ else (run.folder.resolve() / "mlflow").as_uri()
        experiment_id = (
            self._client.create_experiment(run.project, artifact_location=artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        self._id = self._client.create_run(experiment_id, run_name=run.experiment).info.run_id
        run.remember("mlflow", self._id)
        parameters = [Param(key, value[: self.PARAMETER_LIMIT]) for key, value in _flat(plain(run.config))]
        for start in range(0, len(parameters), self.BATCH_LIMIT):
            self._client.log_batch(self._id, params=parameters[start : start + self.BATCH_LIMIT])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(name.replace("@", "_at_"), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=rows)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        rows = [{"input": prompt, "output": answer, "score": score} for prompt, answer, score in generations]
        self._client.log_text(self._id, json.dumps(rows, ensure_ascii=False, indent=1), f"val_generations/{step}.json")

    def finish(self, succeeded: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if succeeded else "FAILED")


class Trackio:
    """Trackio in its local store ($TRACKIO_DIR), or a Space ($TRACKIO_SPACE_ID). A resumed run goes on by name."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=run.project,
            name=run.experiment,
            config=plain(run.config),
            resume="never" if run.resume_step is None else "allow",
            embed=False,
            auto_log_cpu=False,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        import pandas

        table = pandas.DataFrame(generations, columns=["input", "output", "score"])
        self._run.log({"val/generations": self._trackio.Table(dataframe=table)}, step=step)

    def finish(self, succeeded: bool) -> None:
        self._run.finish()


def _backends() -> dict[str, Callable[[TrackedRun], Tracker]]:
    return {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str) and not math.isnan(float(value))
    except (TypeError, ValueError):
        return False


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", str(value)))
    return pairs


def _fenced(text: str) -> str:
    return "````\n" + text + "\n````"
