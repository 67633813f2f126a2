"""What the driver shows of a run."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from jaxrl_ppo.cluster import launch
from jaxrl_ppo.schema.config import Config


def test_what_is_told_before_the_steps_are_known_is_shown(monkeypatch, capsys):
    told = [("note", "asked to stop"), ("warning", "a long wait")]
    monkeypatch.setattr(launch.ray, "get", lambda reference: reference)
    stream = SimpleNamespace(remote=lambda: iter(told))
    runner = SimpleNamespace(events=SimpleNamespace(options=lambda num_returns: stream))
    launch._show(runner, Config())
    assert capsys.readouterr().out == "asked to stop\nwarning: a long wait\n"


def test_ctrl_c_and_sigterm_ask_the_run_to_stop_and_a_further_ctrl_c_ends_it():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    calls = []
    try:
        for first in before:
            asked = launch.stop_when_asked(lambda: calls.append("stop"))
            signal.raise_signal(first)
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert asked == [first, signal.SIGTERM]
        assert calls == ["stop"] * 4
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("ended_by", "then"),
    [
        (Exception("The node with node ID: 1 timed out during startup."), contextlib.nullcontext()),  # Ray's own
        (KeyboardInterrupt(), pytest.raises(KeyboardInterrupt)),
    ],
)
def test_what_a_ray_that_did_not_start_has_left_is_ended(monkeypatch, ended_by, then):
    started = []

    def init(**arguments):
        if started:
            return
        started.append(subprocess.Popen(["sleep", "600"]))
        raise ended_by

    monkeypatch.setattr(launch.ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    other = subprocess.Popen(["sleep", "600"])
    try:
        with then:
            launch.start_ray(Config())
        assert started[0].wait(timeout=10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.fixture
def local_ray():
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def test_a_task_runner_that_does_not_start_is_named_and_given_up(local_ray, capsys):
    @ray.remote(resources={"nowhere": 1})
    class Runner:
        pass

    with pytest.raises(
        launch.RunFailed, match=r"the task runner to start .* after 2 s\. .* free .*: 1 CPU, "
    ) as failed:
        launch.wait_until_started(Runner.remote(), deadline_s=2)
    assert len(str(failed.value).splitlines()) == 1
    waited = "still waiting for the task runner to start (trainer.deadlines.start_s) after 1 of 2 s\n"
    assert capsys.readouterr().out == waited


def test_no_driver_waits_for_workers_that_nobody_asked_for(monkeypatch):
    """Where the machine is so busy that they do not register in time, Ray never lets the driver in."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_prestart_worker_first_driver", raising=False)
    launch.start_ray(Config())
    try:
        (log,) = Path(ray._private.worker.global_worker.node.get_logs_dir_path()).glob("raylet.out")
        assert "Started worker process" not in log.read_text()
    finally:
        ray.shutdown()
