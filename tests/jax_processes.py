"""Runs a script in one or more processes that together make one JAX machine of virtual CPU devices."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import device

ROOT = Path(__file__).parents[1]


def run_script(script, arguments, *, devices, processes=1, flags="", timeout=300):
    """What `script` prints after RESULT, read as JSON, from each of its processes.

    `arguments(rank, coordinator)` are those of a process, `coordinator` the address at which they meet; `devices` are
    each process's, `flags` are further ones of XLA.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | device.jax_environment("cpu", local_devices=devices)
    if flags:
        # Stripped, since XLA takes flags that begin with no dash for the name of a file.
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(script.parent)])
    running = [
        subprocess.Popen(
            [sys.executable, script, *map(str, arguments(rank, coordinator))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    results = []
    for process in running:
        out, errors = process.communicate(timeout=timeout)
        assert process.returncode == 0, errors[-3000:]
        results.append(json.loads(out.rsplit("RESULT ", 1)[1]))
    return results
