"""The real tracking libraries, offline: what was logged is read back with their own readers, over a resume."""

import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from device import pip_install
from jaxrl_ppo.observability import trackers as module
from jaxrl_ppo.observability.trackers import TrackedRun, TrackerError, Trackers, check_trackers

CONFIG = {"trainer": {"project_name": "p", "total_epochs": 3}, "data": {"train_files": ["a.parquet"]}}
ACCURACY = "val-core/sums/acc/mean@1"


def run_in_two_halves(name, folder):
    """Steps 1..3, then a resume at step 2 that does steps 3 and 4."""
    warnings = []
    for resume_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        run = TrackedRun("project", "experiment", CONFIG, folder, resume_step)
        trackers = Trackers(["console", name], run, warnings.append)
        for step in steps:
            trackers.log({"actor/pg_loss": step / 2, ACCURACY: 0.5, "note": "text", "nan": float("nan")}, step)
        trackers.log_generations([("1 + 1?", "2", 1.0)], steps[-1])
        trackers.finish(succeeded=True)
    assert warnings == []
    assert trackers.faults == {}


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_in_two_halves("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"actor/pg_loss", ACCURACY}
    losses = [(e.step, e.value) for e in events.Scalars("actor/pg_loss")]
    assert losses == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]  # step 3 once: the resume purged it
    assert b"a.parquet" in events.Tensors("config")[0].tensor_proto.string_val[0]
    assert b"1 + 1?" in events.Tensors("val/generations/0")[0].tensor_proto.string_val[0]


def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_in_two_halves("mlflow", tmp_path)
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert run.info.run_name == "experiment"
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        "trainer.project_name": "p",
        "trainer.total_epochs": "3",
        "data.train_files": "['a.parquet']",
    }
    history = client.get_metric_history(run.info.run_id, "actor/pg_loss")
    assert {(m.step, m.value) for m in history} == {(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)}
    assert run.data.metrics[ACCURACY.replace("@", "_at_")] == 0.5
    assert len(client.list_artifacts(run.info.run_id, "val_generations")) == 2


def test_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_in_two_halves("wandb", tmp_path)
    import wandb

    wandb.teardown()  # offline, the library's own process writes on for a moment after `finish`
    stores = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(stores) == 2
    assert len({store.name.split("-")[3] for store in stores}) == 1  # one id: wandb sync joins them
    assert [wandb_losses(next(store.glob("*.wandb"))) for store in stores] == [
        [(1, 0.5), (2, 1.0), (3, 1.5)],
        [(3, 1.5), (4, 2.0)],
    ]


def wandb_losses(path):
    """(step, loss) of a .wandb file: protocol buffers in LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, block, offset, parts, losses = path.read_bytes(), 32768, 7, [], []
    while offset + 7 <= len(data):
        if block - offset % block < 7:
            offset += block - offset % block
            continue
        length, kind = struct.unpack_from("<HB", data, offset + 4)
        parts.append(data[offset + 7 : offset + 7 + length])
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record.FromString(b"".join(parts))
            parts = []
            row = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            if "actor/pg_loss" in row:
                losses.append((record.history.step.num, float(row["actor/pg_loss"])))
    return losses


def test_trackio(tmp_path):
    """In a child process, since the library reads $TRACKIO_DIR when it is imported."""
    script = f"""
import json, pathlib, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_trackers import run_in_two_halves
run_in_two_halves("trackio", pathlib.Path({str(tmp_path)!r}))
from trackio.sqlite_storage import SQLiteStorage
assert SQLiteStorage.get_runs("project") == ["experiment"]
found = [SQLiteStorage.get_logs("project", "experiment"), SQLiteStorage.get_run_config("project", "experiment")]
pathlib.Path({str(tmp_path / "found.json")!r}).write_text(json.dumps(found))
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "store"), "PYTHONPATH": os.getcwd()}
    child = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    logs, config = json.loads((tmp_path / "found.json").read_text())
    assert {(row["step"], row["actor/pg_loss"]) for row in logs if "actor/pg_loss" in row} == {
        (1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0),
    }  # fmt: skip
    assert sum("val/generations" in row for row in logs) == 2
    assert config["data"] == {"train_files": ["a.parquet"]}


def test_faults_in_the_logger_list_are_named_together(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "mlflow" else object())
    with pytest.raises(TrackerError) as error:
        check_trackers(["console", "wandbb", "mlflow", "wandb"])
    assert "'wandbb' is not a tracker; known are console, tensorboard" in str(error.value)
    assert f"run: {pip_install('mlflow')}" in str(error.value)
    check_trackers(["console"])


def test_a_tracker_that_cannot_start_is_an_error_at_start(tmp_path, monkeypatch):
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(TrackerError, match="tensorboard did not start"):
        Trackers(["tensorboard"], TrackedRun("p", "e", {}, tmp_path), print)


class Stubborn:
    """A tracker whose first call waits for `gate`; then every call raises."""

    gate = threading.Event()

    def __init__(self, run):
        pass

    def log(self, metrics, step):
        self.gate.wait()
        raise ConnectionError(f"no route at step {step}")

    log_generations = log

    def finish(self, succeeded):
        raise ConnectionError("no route at the end")


def test_a_tracker_that_fails_or_stalls_costs_only_its_own_calls(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(module, "BACKLOG", 5)
    monkeypatch.setattr(module, "_backends", lambda: {"tensorboard": module.TensorBoard, "wandb": Stubborn})
    trackers = Trackers(["wandb"], TrackedRun("p", "e", {}, tmp_path), warnings.append)
    for step in range(1, 11):
        trackers.log({"loss": 1.0}, step)  # returns though the tracker stands still
    assert trackers.faults["wandb"] >= 4
    Stubborn.gate.set()
    trackers.finish(succeeded=True)
    assert trackers.faults["wandb"] >= 10
    assert len(warnings) == 1
    assert warnings[0].startswith("tracker wandb failed")
