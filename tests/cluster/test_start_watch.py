"""A Ray that never lets the driver in: told half-way, ended at the deadline, even while it holds the lock."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


def python(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture
def silent() -> Iterator[str]:
    """An address whose connections are accepted, by the kernel, and never answered."""
    with socket.create_server(("0.0.0.0", 0), backlog=64) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


JOIN = """
import sys
from jaxrl_ppo.main import run_ppo
from jaxrl_ppo.schema.config import Config
config = Config()
config.trainer.deadlines.start_s, config.trainer.default_local_dir = 2.0, sys.argv[1]
config.ray_kwargs.ray_init.address = sys.argv[2]
run_ppo(config)
"""


def test_a_cluster_that_never_answers_ends_the_driver_as_other_failures_do(silent, tmp_path):
    driver = python(JOIN, str(tmp_path), silent)
    out, err = driver.communicate(timeout=300)
    what = f"waiting for Ray at {silent} (trainer.deadlines.start_s) after"
    assert out == f"still {what} 1 of 2 s\n"
    told = [line for line in err.splitlines() if not line.startswith("[")]  # others are Ray's own
    assert told[0].startswith(f"gave up {what} 2 s. ")
    assert f"`ray status --address={silent}`" in told[0]
    assert told[1:] == [
        "once that is mended, the same command starts again at step 1: there is no checkpoint to go on from in "
        f"{tmp_path}"
    ]
    assert driver.returncode == 1


HOLD = """
import ctypes, subprocess
from jaxrl_ppo.cluster.start_watch import start_watch
with start_watch("Ray", 4.0, "gave up"):
    command = ["sh", "-c", "sleep 600 >&- 2>&- & echo $!; wait"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    print(child.pid, child.stdout.readline(), flush=True, end="")
    ctypes.PyDLL(None).sleep(600)
print("let in")
"""


def test_a_driver_whose_lock_is_held_ends_and_nothing_that_it_started_is_left():
    driver = python(HOLD)
    out, err = driver.communicate(timeout=60)
    pids, half = out.splitlines()
    assert (half, err, driver.returncode) == ("still waiting for Ray after 2 of 4 s", "gave up\n", 1)
    child, grandchild = map(int, pids.split())
    _, left = psutil.wait_procs([psutil.Process(p) for p in (child, grandchild) if psutil.pid_exists(p)], timeout=20)
    assert left == []


IN_TIME = """
import time
import psutil
from jaxrl_ppo.cluster.start_watch import start_watch
me = psutil.Process()
threads = me.num_threads()
with start_watch("Ray", 600.0, "gave up"):
    assert me.num_threads() > threads
assert (me.num_threads(), me.children()) == (threads, [])
with start_watch("Ray", 600.0, "gave up"):
    print(me.children()[0].pid, flush=True)
    time.sleep(600)
"""


def test_a_start_in_time_and_a_driver_that_is_killed_leave_no_watch_behind():
    driver = python(IN_TIME)
    watch = psutil.Process(int(driver.stdout.readline()))
    driver.kill()
    watch.wait(timeout=20)
    assert driver.communicate() == ("", "")
