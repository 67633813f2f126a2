"""A state saved on eight devices goes on, on two, as on the eight: parameters and optimizer, policy and critic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import device

HERE = Path(__file__).parent


def test_a_state_saved_on_eight_devices_goes_on_on_two(tiny_model, tmp_path):
    environment = os.environ | device.jax_environment("cpu", local_devices=8)
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent.parent), str(HERE)])
    command = [sys.executable, str(HERE / "restore_script.py"), str(tiny_model), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, result in json.loads(done.stdout.rsplit("RESULT ", 1)[1]).items():
        assert result["version"] == 2, name
        for metric, (eight, two) in result["metrics"].items():
            assert two == pytest.approx(eight, rel=1e-4, abs=1e-5), (name, metric)
        assert result["apart"] < 1e-4, name  # of steps of about 1e-2, which depend on the optimizer's state
