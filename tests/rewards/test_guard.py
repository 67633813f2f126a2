"""Processes of pools end with the process that made the pool, also while code in C holds the interpreter's lock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
POOLS = """
import concurrent.futures, ctypes, multiprocessing, os, time
import pebble
from jaxrl_ppo.guard import guard_pool_process

def say():
    print(os.getpid(), flush=True)

def hold():
    say()
    ctypes.PyDLL(None).sleep(600)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(2, spawn, guard_pool_process)
    pool.submit(hold)
    pool.submit(say)  # that process has nothing more to do
    pebble.ProcessPool(1, initializer=guard_pool_process, context=spawn).schedule(hold)
    time.sleep(600)
"""


def test_busy_and_idle_processes_of_a_pool_end_with_their_parent(tmp_path):
    script = tmp_path / "pools.py"
    script.write_text(POOLS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        workers = [psutil.Process(int(parent.stdout.readline())) for _ in range(3)]
    finally:
        parent.kill()
        parent.wait()
    _, left = psutil.wait_procs(workers, timeout=60)
    assert left == []
