"""The run's observer: one step, one validation and the end, as files, as trackers and as told to the console."""

import dataclasses

import pytest
import yaml

from jaxrl_ppo.observability.files import read_json_lines
from jaxrl_ppo.observability.observer import RunObserver
from jaxrl_ppo.observability.run_folder import read_metrics
from jaxrl_ppo.observability.timeline import RESUMED, read_marks, read_spans
from jaxrl_ppo.schema.config import TrainerConfig

ACCURACY = "val-core/sums/acc/mean@1"


@pytest.fixture
def observe(tmp_path):
    """Makes an observer and the list of what it tells."""

    def make(resume_step=None, **changed):
        settings = dataclasses.replace(
            TrainerConfig(),
            default_local_dir=str(tmp_path / "run"),
            logger=["console", "tensorboard"],
            project_name="p",
            experiment_name="e",
            log_val_generations=1,
            rollout_data_dir=str(tmp_path / "rollouts"),
            validation_data_dir=str(tmp_path / "validations"),
            **changed,
        )
        told = []
        observer = RunObserver(
            settings,
            config={"trainer": {"project_name": "p"}},
            config_yaml="trainer: {project_name: p}\n",
            resume_step=resume_step,
            decode=str,
            tell=told.append,
        )
        return observer, told

    return make


def test_a_run_and_its_resume(observe, tmp_path, batch, samples):
    observer, told = observe()
    observer.validation(0, batch.prompts, samples[:2], {ACCURACY: 0.25})
    for step in (1, 2):
        with observer.span("adv", track="advantage", step=step):
            pass
        observer.rollout(step, batch, samples)
        observer.step(step, {"timing_s/step": 100.0, "critic/score/mean": 0.5})
    observer.fault("replica_died", "replica 1 died", replica=1)

    observer, told = observe(resume_step=1)  # as after a kill: the first observer never finished
    observer.rollout(2, batch, samples)
    observer.validation(2, batch.prompts, samples[:2], {ACCURACY: 0.75})
    observer.step(2, {"timing_s/step": 100.0, "critic/score/mean": 0.5, ACCURACY: 0.75})
    observer.finish(succeeded=True)

    folder = tmp_path / "run"
    rows = read_metrics(folder)
    assert [(row["step"], row.get(ACCURACY)) for row in rows] == [(0, 0.25), (1, None), (2, 0.75)]
    assert rows[1]["perf/idle_share/trainer"] == pytest.approx(1.0, abs=0.01)
    assert [(span.name, span.track, span.step) for span in read_spans(folder / "timeline.json")] == [
        ("adv", "advantage", 1)
    ]
    marks = read_marks(folder / "timeline.json")
    assert [(mark.name, mark.step) for mark in marks] == [(RESUMED, 1)]
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"trainer": {"project_name": "p"}}
    assert sorted(path.name for path in (folder / "samples").iterdir()) == [
        "rollout_000001.jsonl", "rollout_000002.jsonl", "validation_000000.jsonl", "validation_000002.jsonl",
    ]  # fmt: skip
    assert len(read_json_lines(tmp_path / "rollouts" / "2.jsonl")) == 4
    assert len(read_json_lines(tmp_path / "validations" / "2.jsonl")) == 2
    assert [event[:2] for event in told[:2]] == [("validation", 2), ("step", 2)]
    method, before, after, where, in_steps = told[-1]
    assert (method, before[ACCURACY], after[ACCURACY], where) == ("summary", 0.25, 0.75, str(folder))
    assert in_steps == 200  # step 1, before the resume, included


def test_a_run_that_failed_has_no_summary(observe):
    observer, told = observe()
    observer.warn("careful")
    observer.finish(succeeded=False)
    assert told == [("warning", "careful")]


def test_validation_alone_leaves_the_record_of_the_training_as_it_is(observe, tmp_path, batch, samples):
    observer, _ = observe()
    observer.rollout(1, batch, samples)
    observer.validation(1, batch.prompts, samples[:2], {ACCURACY: 0.75})
    observer.step(1, {"timing_s/step": 100.0, ACCURACY: 0.75})
    observer.finish(succeeded=True)
    folder = tmp_path / "run"
    written = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    for accuracy in (0.5, 0.25):  # the second time, what the first wrote is set aside
        observer, told = observe(resume_step=1, val_only=True)
        observer.validation(1, batch.prompts, samples[:2], {ACCURACY: accuracy})
        observer.finish(succeeded=True)
        assert [event[0] for event in told] == ["validation", "summary"]
        assert [(row["step"], row[ACCURACY]) for row in read_metrics(folder / "val_only")] == [(1, accuracy)]
    assert written == {path: path.read_bytes() for path in written}
