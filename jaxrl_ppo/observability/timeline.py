"""The timeline of a run: Chrome trace events in a file that is valid JSON at every moment; overlap of phases."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxrl_ppo.observability.files import plain, write_atomically

TRAINING = ("old_log_prob", "ref", "values", "advantage", "update_critic", "update_actor")
# The named phases of a run, by what they keep busy. Each phase is a track of its own; a track of any other name goes to
# the group "other". "generation" may carry a replica: "generation/0".
GROUPS: dict[str, tuple[str, ...]] = {
    "rollout": ("generation",),
    "rewards": ("reward",),
    "tools": ("tools",),
    "trainer": TRAINING,
    "both pools": ("weight_sync", "validation", "checkpoint"),
}
FAULTS = "faults"
RESUMED = "resumed"  # the track and the name of the mark that a resume leaves
EVENTS_PER_FILE = 20_000
FLUSH_SECONDS = 2.0
RECENT_SPANS = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One phase of one step. Times are seconds since the epoch."""

    name: str
    track: str
    start: float
    end: float
    step: int | None = None
    args: dict[str, Any] = dataclasses.field(default_factory=dict)


class Timeline:
    """Collects events and keeps `path` a complete JSON file in Chrome's trace format.

    Opens in chrome://tracing or ui.perfetto.dev. Each flush replaces the file in one rename. To keep that cheap, a file
    that has reached `EVENTS_PER_FILE` events is closed as `timeline-000001.json`, … and a new one begins. Safe to use
    from several threads. With `resume_step`, events of later steps are dropped first, and the resume is marked.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._tracks: dict[str, tuple[int, int]] = {}
        self._lines: list[str] = []  # one event each
        self._recent: collections.deque[Span] = collections.deque(maxlen=RECENT_SPANS)
        self._written = 0.0
        self._dirty = False
        if resume_step is not None:
            self._drop_after(resume_step)
        self._closed_files = len(_closed_parts(self._path))
        if resume_step is not None:
            self.instant(RESUMED, step=resume_step, track=RESUMED)

    @contextlib.contextmanager
    def span(self, name: str, *, step: int | None = None, track: str | None = None, **args: Any) -> Iterator[None]:
        """Time the enclosed block as phase `name`, on the track of that name unless `track` says otherwise.

        A block that raises is recorded too, with `error` naming the exception's type.
        """
        start, clock = time.time(), time.perf_counter()
        try:
            yield
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            self.event(name, start, start + time.perf_counter() - clock, step=step, track=track, **args)

    def event(
        self, name: str, start: float, end: float, *, step: int | None = None, track: str | None = None, **args: Any
    ) -> None:
        """Record a phase that ran from `start` to `end` (seconds since the epoch, from any process)."""
        if end < start:
            raise ValueError(f"timeline event {name!r} of step {step} ends {start - end:.6f} s before it starts")
        self._add("X", name, track or name, start, step, args, dur=_microseconds(end - start))
        with self._lock:
            self._recent.append(Span(name, track or name, start, end, step, args))

    def instant(self, name: str, *, step: int | None = None, track: str = FAULTS, **args: Any) -> None:
        """Mark a moment: a dead replica, a retried request, a rejected sample."""
        self._add("i", name, track, time.time(), step, args, s="g")

    def counter(self, name: str, **values: float) -> None:
        """Record the values of a counter track at this moment, e.g. requests running and waiting."""
        self._add("C", name, name, time.time(), None, dict(values))

    def pool_metrics(self, start: float, end: float) -> dict[str, float]:
        """How the pools used the time between two moments: `perf/idle_share/{trainer,rollout}` and `perf/overlap_s`.

        The rollout pool's share is the mean over its replicas; overlap is generation while training ran, in seconds.
        A pool that recorded nothing in that time has no share.
        """
        with self._lock:
            spans = [
                dataclasses.replace(span, start=max(start, span.start), end=min(end, span.end))
                for span in self._recent
                if span.end > start and span.start < end
            ]
        replicas: dict[str, list[Span]] = {}
        for span in spans:
            if span.track.split("/")[0] == "generation":
                replicas.setdefault(span.track, []).append(span)
        training = [span for span in spans if span.track in TRAINING]
        metrics = {}
        if replicas:
            busy = sum(map(busy_seconds, replicas.values())) / len(replicas)
            metrics["perf/idle_share/rollout"] = 1 - busy / (end - start)
        if training:
            metrics["perf/idle_share/trainer"] = 1 - busy_seconds(training) / (end - start)
        if replicas and training:
            metrics["perf/overlap_s"] = overlap_seconds([span for one in replicas.values() for span in one], training)
        return metrics

    def overlap_metrics(self, step: int) -> dict[str, float]:
        """`perf/generation_overlapped_s`: seconds of batch `step`'s generation beside the training of another batch."""
        with self._lock:
            spans = list(self._recent)
        generation = [span for span in spans if span.step == step and span.track.split("/")[0] == "generation"]
        training = [span for span in spans if span.step != step and span.track in TRAINING]
        return {"perf/generation_overlapped_s": overlap_seconds(generation, training)} if generation else {}

    def flush(self) -> None:
        """Write everything recorded so far. Called on its own every few seconds; call it at the end of each step."""
        with self._lock:
            if self._dirty:
                self._write()

    def _add(
        self, kind: str, name: str, track: str, start: float, step: int | None, args: dict[str, Any], **more: Any
    ) -> None:
        if step is not None:
            args = {"step": step, **args}
        with self._lock:
            pid, tid = self._track(track)
            event = {"ph": kind, "name": name, "pid": pid, "tid": tid, "ts": _microseconds(start), **more}
            self._lines.append(_line({**event, "args": plain(args)}))
            self._dirty = True
            if time.monotonic() - self._written > FLUSH_SECONDS:
                self._write()

    def _track(self, track: str) -> tuple[int, int]:
        if track not in self._tracks:
            base = track.split("/")[0]
            pid = next((pid for pid, names in enumerate(GROUPS.values(), start=1) if base in names), len(GROUPS) + 1)
            self._tracks[track] = (pid, len(self._tracks) + 1)
        return self._tracks[track]

    def _drop_after(self, step: int) -> None:
        """Keep the events of steps up to `step`; those of the newest part stay in memory, to be added to."""
        for part in [*_closed_parts(self._path), self._path]:
            events = _read_events(part)
            self._tracks = {e["args"]["name"]: (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
            kept = [e for e in events if e["ph"] != "M" and e["args"].get("step", step) <= step]
            self._lines = [_line(event) for event in kept]
            if events:
                write_atomically(part, self._text())

    def _write(self) -> None:
        if len(self._lines) >= EVENTS_PER_FILE:
            closed = self._path.with_name(f"{self._path.stem}-{self._closed_files + 1:06d}{self._path.suffix}")
            write_atomically(closed, self._text())
            self._closed_files += 1
            self._lines.clear()
        write_atomically(self._path, self._text())
        self._written = time.monotonic()
        self._dirty = False

    def _text(self) -> str:
        names: list[dict[str, Any]] = []
        for pid, group in enumerate([*GROUPS, "other"], start=1):
            names.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": group}})
        for track, (pid, tid) in self._tracks.items():
            names.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}})
        return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join([*map(_line, names), *self._lines]) + "\n]}\n"


def read_spans(path: str | Path) -> list[Span]:
    """The phases in a timeline file and its closed earlier parts, in order of their start."""
    return _read(path, "X")


def read_marks(path: str | Path) -> list[Span]:
    """The instant events in a timeline file and its closed earlier parts, resumes (on the track RESUMED) and faults.

    They end where they start; a resume has the step that it went on after.
    """
    return _read(path, "i")


def _read(path: str | Path, kind: str) -> list[Span]:
    path = Path(path)
    spans: list[Span] = []
    for part in [*_closed_parts(path), path]:
        events = _read_events(part)
        tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        for event in events:
            if event["ph"] == kind:
                args = dict(event["args"])
                start = event["ts"] / 1e6
                track = tracks[event["pid"], event["tid"]]
                spans.append(
                    Span(event["name"], track, start, start + event.get("dur", 0) / 1e6, args.pop("step", None), args)
                )
    return sorted(spans, key=lambda span: span.start)


def overlap_seconds(first: Iterable[Span], second: Iterable[Span]) -> float:
    """Seconds in which at least one span of `first` and one of `second` are running."""
    total = 0.0
    others = _merged(second)
    for start, end in _merged(first):
        total += sum(max(0.0, min(end, other_end) - max(start, other_start)) for other_start, other_end in others)
    return total


def busy_seconds(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans is running."""
    return sum(end - start for start, end in _merged(spans))


def generation_overlap(spans: Iterable[Span]) -> dict[int, float]:
    """For each step t that trained: seconds in which the generation of batch t + 1 ran during the training of batch t.

    Training is what runs on the tracks old_log_prob, ref, values, advantage, update_critic and update_actor;
    generation, on the tracks "generation" and "generation/<replica>".
    """
    generation: dict[int, list[Span]] = {}
    training: dict[int, list[Span]] = {}
    for span in spans:
        if span.step is None:
            continue
        if span.track.split("/")[0] == "generation":
            generation.setdefault(span.step, []).append(span)
        elif span.track in TRAINING:
            training.setdefault(span.step, []).append(span)
    return {step: overlap_seconds(generation.get(step + 1, []), training[step]) for step in sorted(training)}


def _merged(spans: Iterable[Span]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _closed_parts(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.stem}-*{path.suffix}"))


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"), allow_nan=False)


def _read_events(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
