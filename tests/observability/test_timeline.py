"""The timeline: tracks by name, times from other processes, resume, parts, overlap against sums done by hand."""

import json

import pytest

from jaxrl_ppo.observability import timeline as module
from jaxrl_ppo.observability.timeline import (
    Span,
    Timeline,
    busy_seconds,
    generation_overlap,
    overlap_seconds,
    read_marks,
    read_spans,
)


def span(name, start, end, step=None):
    return Span(name, name, start, end, step)


def test_chrome_trace_with_a_track_for_each_phase_and_replica(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.event("generation", 100.0, 103.5, step=2, track="generation/1", samples=64)
    timeline.event("generation", 100.0, 103.0, step=2, track="generation/0")
    with timeline.span("update_actor", step=1):
        pass
    timeline.instant("replica 1 replaced", step=1)
    timeline.counter("requests", running=3, waiting=1)
    timeline.flush()
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"]: (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(tracks) == {"generation/0", "generation/1", "update_actor", "faults", "requests"}
    assert len({tid for _, tid in tracks.values()}) == 5
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes[tracks["generation/0"][0]] == "rollout"
    assert processes[tracks["update_actor"][0]] == "trainer"
    first = next(e for e in events if e["ph"] == "X")
    assert first["ts"] == 100_000_000
    assert first["dur"] == 3_500_000
    assert first["args"] == {"step": 2, "samples": 64}
    assert next(e for e in events if e["ph"] == "C")["args"] == {"running": 3, "waiting": 1}
    assert [(mark.name, mark.step) for mark in read_marks(tmp_path / "timeline.json")] == [("replica 1 replaced", 1)]


def test_spans_come_back_as_written_and_a_raising_block_says_so(tmp_path):
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    with pytest.raises(KeyError), timeline.span("reward", step=4, batch=8):
        raise KeyError
    timeline.event("generation", 50.0, 50.25, step=4, track="generation/0")
    timeline.flush()
    spans = read_spans(path)
    assert spans[0] == Span("generation", "generation/0", 50.0, 50.25, 4, {})
    assert (spans[1].name, spans[1].step, spans[1].args) == ("reward", 4, {"batch": 8, "error": "KeyError"})


def test_an_event_that_ends_before_it_starts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'reward' of step 3"):
        Timeline(tmp_path / "t.json").event("reward", 2.0, 1.0, step=3)


def test_resume_drops_later_steps_in_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EVENTS_PER_FILE", 3)
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    for step in range(1, 9):
        timeline.event("reward", float(step), step + 0.5, step=step)
        timeline.flush()
    assert len(list(tmp_path.glob("timeline-*.json"))) == 2
    assert [s.step for s in read_spans(path)] == list(range(1, 9))

    resumed = Timeline(path, resume_step=4)
    resumed.event("reward", 105.0, 105.5, step=5)
    resumed.event("values", 106.0, 106.5, step=5)
    resumed.flush()
    assert [(s.step, s.track) for s in read_spans(path)] == [
        (1, "reward"), (2, "reward"), (3, "reward"), (4, "reward"), (5, "reward"), (5, "values"),
    ]  # fmt: skip


def test_overlap_counts_no_second_twice():
    first = [span("a", 0, 6), span("a", 1, 2), span("a", 10, 11)]
    second = [span("b", 2, 5), span("b", 4, 5.5), span("b", 10.5, 20)]
    assert overlap_seconds(first, second) == pytest.approx(3.5 + 0.5)
    assert overlap_seconds(first, []) == 0
    assert busy_seconds(first) == pytest.approx(7)


def test_generation_of_the_next_batch_during_training():
    one_step_off = [
        Span("generation", "generation/0", 0, 5, 1),
        Span("generation", "generation/0", 5, 10, 2),
        Span("generation", "generation/1", 5, 8, 2),
        span("old_log_prob", 5, 7, 1),
        span("update_actor", 7, 11, 1),
        span("update_actor", 11, 12, 2),
    ]
    assert generation_overlap(one_step_off) == {1: pytest.approx(5), 2: 0}
    sync = [span("generation", 0, 5, 1), span("update_actor", 5, 9, 1), span("generation", 9, 12, 2)]
    assert generation_overlap(sync) == {1: 0}


def test_idle_shares_of_the_pools_within_a_step(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    assert timeline.pool_metrics(0.0, 1.0) == {}
    timeline.event("generation", 98.0, 106.0, step=2, track="generation/0")  # 6 of 10 seconds within the step
    timeline.event("generation", 100.0, 104.0, step=2, track="generation/1")  # 4 of 10
    timeline.event("old_log_prob", 101.0, 103.0, step=1)
    timeline.event("update_actor", 103.0, 108.0, step=1)
    timeline.event("update_actor", 90.0, 99.0, step=0)
    assert timeline.pool_metrics(100.0, 110.0) == {
        "perf/idle_share/rollout": pytest.approx(0.5),
        "perf/idle_share/trainer": pytest.approx(0.3),
        "perf/overlap_s": pytest.approx(5.0),
    }


def test_generation_of_a_batch_beside_the_training_of_another(tmp_path):
    """Batch 2 is generated from 2 to 12; batch 1 trains from 4 to 10, batch 2 from 12 on."""
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.event("gen", 2.0, 12.0, step=2, track="generation")
    timeline.event("update_actor", 4.0, 9.0, step=1, track="update_actor")
    timeline.event("adv", 9.0, 10.0, step=1, track="advantage")
    timeline.event("update_actor", 11.0, 20.0, step=2, track="update_actor")
    assert timeline.overlap_metrics(2) == {"perf/generation_overlapped_s": 6.0}
    assert timeline.overlap_metrics(1) == {}
