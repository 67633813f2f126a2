"""Reads a run folder into the compact form that the report's page holds."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_ppo.observability.files import read_json_lines
from jaxrl_ppo.observability.run_folder import RunFolder, read_metrics
from jaxrl_ppo.observability.samples import step_of
from jaxrl_ppo.observability.timeline import RESUMED, read_marks, read_spans

# What a row of samples is called in the page's data, to keep 100,000 of them small.
TEXT_KEYS = {
    "prompt": "p",
    "question": "q",
    "response": "r",
    "ground_truth": "g",
    "reward_parts": "parts",
    "labels": "labels",
    "turns": "turns",
    "index": "i",
    "finish_reason": "f",
    "versions": "v",
    "advantage": "a",
    "mask": "m",
    "tokens": "t",
}


class ReportError(ValueError):
    """A folder that holds no run, or files in it that cannot be read."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunData:
    """One run. `summary` is JSON for the page's start; `chunks` are base64 of gzipped JSON, one a sample file, which
    the page unpacks when a sample of that file is looked at."""

    summary: dict[str, Any]
    chunks: list[str]


def collect_run(path: str | Path, name: str, *, sample_bytes: int) -> RunData:
    """Read the run folder `path`. The texts of samples take at most `sample_bytes` of the page; where there are more,
    each step keeps its first ones and the rest only count in the distributions.

    Raises ReportError naming the folder when it holds no run, or the file that cannot be read.
    """
    run = RunFolder(path)
    if not run.metrics.exists():
        raise ReportError(
            f"{path}: no run here (no {run.metrics.name}); give the folder trainer.default_local_dir names"
        )
    try:
        metrics = read_metrics(path)
        spans = _spans(run.timeline)
        files, chunks, columns = _samples(run.samples, sample_bytes)
    except (ValueError, KeyError) as error:
        raise ReportError(f"{path}: a file of the run cannot be read: {error}") from error
    return RunData(
        {
            "name": name,
            "folder": str(run.path.resolve()),
            "config": run.config.read_text(encoding="utf-8") if run.config.exists() else "",
            "steps": [row["step"] for row in metrics],
            "metrics": _metric_columns(metrics),
            "spans": spans,
            "files": files,
            **columns,
        },
        chunks,
    )


def _metric_columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    names = {name for row in rows for name, value in row.items() if isinstance(value, int | float)} - {"step"}
    return {name: [_short(row.get(name)) for row in rows] for name in sorted(names)}


def _spans(path: Path) -> dict[str, Any]:
    """Spans as columns, marks (faults) and resumes; times in milliseconds since the first span."""
    spans, marks = read_spans(path), read_marks(path)
    tracks = sorted({span.track for span in spans})
    names = sorted({span.name for span in spans})
    first = min((span.start for span in spans), default=0.0)
    return {
        "tracks": tracks,
        "names": names,
        "track": [tracks.index(span.track) for span in spans],
        "name": [names.index(span.name) for span in spans],
        "start": [round((span.start - first) * 1e3) for span in spans],
        "length": [round((span.end - span.start) * 1e3, 1) for span in spans],
        "step": [span.step for span in spans],
        "marks": [
            {"at": round((mark.start - first) * 1e3), "name": mark.name, "step": mark.step, "args": mark.args}
            for mark in marks
            if mark.track != RESUMED
        ],
        "resumes": [
            {"at": round((mark.start - first) * 1e3), "step": mark.step, "time": round(mark.start)}
            for mark in marks
            if mark.track == RESUMED
        ],
    }


def _samples(folder: Path, sample_bytes: int) -> tuple[list[dict[str, Any]], list[str], dict[str, Any]]:
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: (step_of(path), path.name))
    sources: dict[str, int] = {}
    rewards: list[float] = []
    lengths: list[int] = []
    ordinals: list[int] = []
    source_of: list[int] = []
    files, chunks = [], []
    for path in paths:
        rows = read_json_lines(path)
        for row in rows:
            rewards.append(float("nan") if row["reward"] is None else row["reward"])
            lengths.append(row["length"])
            ordinals.append(row["ordinal"])
            source_of.append(sources.setdefault(row["source"], len(sources)))
        chunk, kept = _chunk(rows, sample_bytes // len(paths))
        chunks.append(chunk)
        versions = [version for row in rows for version, _ in row["versions"]]
        files.append(
            {
                "kind": path.stem.rpartition("_")[0],
                "step": step_of(path),
                "rows": len(rows),
                "kept": kept,
                "versions": [min(versions), max(versions)] if versions else None,
            }
        )
    columns = {
        "sources": list(sources),
        "source": _packed(source_of, np.uint16),
        "reward": _packed(rewards, np.float32),
        "length": _packed(lengths, np.uint32),
        "ordinal": _packed(ordinals, np.uint32),
    }
    return files, chunks, columns


def _chunk(rows: Sequence[dict[str, Any]], limit: int) -> tuple[str, int]:
    """Base64 of the gzipped first rows that fit in `limit` bytes, and their number."""
    short = [_short_row(row) for row in rows]
    kept = len(short)
    while True:
        text = json.dumps(short[:kept], ensure_ascii=False, separators=(",", ":"))
        packed = base64.b64encode(gzip.compress(text.encode(), compresslevel=4, mtime=0)).decode()
        if len(packed) <= limit or kept == 0:
            return packed, kept
        kept = min(kept - 1, int(kept * limit / len(packed) * 0.97))


def _short_row(row: dict[str, Any]) -> dict[str, Any]:
    short = {TEXT_KEYS[key]: value for key, value in row.items() if key in TEXT_KEYS}
    engine, trainer = row.get("log_probs"), row.get("trainer_log_probs")
    if engine is not None:
        short["l"] = [round(value, 2) for value in engine]
        if trainer is not None:
            short["d"] = [round(after - before, 3) for before, after in zip(engine, trainer)]
    return short


def _packed(values: Sequence[float], dtype: type) -> str:
    return base64.b64encode(np.asarray(values, dtype).astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()


def _short(value: Any) -> float | None:
    """Six significant digits: all a curve can show."""
    return None if not isinstance(value, int | float) else float(f"{value:.6g}")
