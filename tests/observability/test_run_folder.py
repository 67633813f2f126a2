"""The run folder: resume drops later steps, half-written lines are tolerated, killed writers leave readable files."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from jaxrl_ppo.observability import run_folder as module
from jaxrl_ppo.observability.run_folder import RunFolder, obstacle, read_metrics


def started(path, resume_step=None):
    run = RunFolder(path)
    run.start(config_yaml="trainer: {}\n", resume_step=resume_step)
    return run


def test_one_object_a_step_with_numpy_values_and_nan_as_null(tmp_path):
    run = started(tmp_path / "deep" / "run")
    run.write_metrics(1, {"actor/pg_loss": np.float32(0.25), "critic/score/mean": float("nan"), "step": 99})
    line = run.metrics.read_text().strip()
    assert json.loads(line) == {"step": 1, "actor/pg_loss": 0.25, "critic/score/mean": None}
    assert run.config.read_text() == "trainer: {}\n"
    assert run.samples.is_dir()


def test_a_step_written_twice_is_merged(tmp_path):
    run = started(tmp_path)
    for step in (1, 2, 3):
        run.write_metrics(step, {"loss": float(step)})
    run.write_metrics(2, {"val-core/sums/acc/mean@1": 0.5})
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[1] == {"step": 2, "loss": 2.0, "val-core/sums/acc/mean@1": 0.5}


def test_resume_drops_later_steps_and_a_half_written_line(tmp_path):
    run = started(tmp_path)
    for step in range(1, 6):
        run.write_metrics(step, {"loss": float(step)})
    with run.metrics.open("a") as file:
        file.write('{"step":6,"lo')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]

    resumed = started(tmp_path, resume_step=3)
    resumed.write_metrics(4, {"loss": 40.0})
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    run = started(tmp_path)
    run.metrics.write_text('{"step":1}\nnonsense\n{"step":2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_metrics(tmp_path)


def test_a_run_from_nothing_sets_the_old_one_aside(tmp_path):
    old = started(tmp_path)
    old.write_metrics(1, {"loss": 1.0})
    (tmp_path / "global_step_1").mkdir()
    new = started(tmp_path)
    assert read_metrics(tmp_path) == []
    assert read_metrics(tmp_path / "previous-1") == [{"step": 1, "loss": 1.0}]
    new.write_metrics(1, {"loss": 2.0})
    started(tmp_path)
    assert read_metrics(tmp_path / "previous-1") == [{"step": 1, "loss": 1.0}]
    assert read_metrics(tmp_path / "previous-2") == [{"step": 1, "loss": 2.0}]
    assert (tmp_path / "global_step_1").is_dir()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"trainer\.default_local_dir=.*file"):
        started(tmp_path / "file" / "run")


def test_what_is_in_a_folders_way_is_known_without_making_it(tmp_path, monkeypatch):
    """By name where it is: above the folder, or in its place; a link that leads nowhere too."""
    assert obstacle(tmp_path / "deep" / "run") is None
    assert not (tmp_path / "deep").exists()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for place in ("file", "link"):
        told = f"cannot be made: {tmp_path / place} is in the way, and is no folder"
        assert obstacle(tmp_path / place) == obstacle(tmp_path / place / "run") == told
    told = "cannot be made: /proc takes no new folder (No such file or directory)"  # though root may write there
    assert obstacle("/proc/mine/run") in (told, "cannot be made: this user may not write to /proc")
    before = sorted(tmp_path.iterdir())
    assert obstacle(tmp_path) is None
    assert sorted(tmp_path.iterdir()) == before

    def refuse(**_):
        raise PermissionError

    monkeypatch.setattr(module.tempfile, "mkdtemp", refuse)  # root may write anywhere
    assert obstacle(tmp_path) == f"cannot be written: this user may not write to {tmp_path}"
    assert obstacle(tmp_path / "run") == f"cannot be made: this user may not write to {tmp_path}"


def test_killed_writer_leaves_every_file_readable(tmp_path):
    """A child writes metrics and timeline as fast as it can and is killed with SIGKILL; a reader watches."""
    script = textwrap.dedent(
        """
        import itertools, sys
        from jaxrl_ppo.observability.run_folder import RunFolder
        from jaxrl_ppo.observability.timeline import Timeline
        run = RunFolder(sys.argv[1])
        run.start(config_yaml="a: 1", resume_step=None)
        timeline = Timeline(run.timeline)
        for step in itertools.count(1):
            with timeline.span("update_actor", step=step, note="x" * 200):
                run.write_metrics(step, {f"metric/{i}": i / 3 for i in range(50)})
            timeline.flush()
            if step == 20:
                print("going", flush=True)
        """
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, cwd=os.getcwd())
    assert child.stdout.readline() == b"going\n"
    for _ in range(50):
        json.loads((tmp_path / "timeline.json").read_text())
        read_metrics(tmp_path)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    steps = [row["step"] for row in read_metrics(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 20
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [e["args"]["step"] for e in events if e["ph"] == "X"][:20] == list(range(1, 21))
