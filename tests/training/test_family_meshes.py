"""Every family: the same updates on one device and on eight, whichever way they divide the work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from family_models import CONFIGS, save_family

import device

HERE = Path(__file__).parent
MESHES = [{"fsdp": 1}, {"fsdp": 8}, {"fsdp": 2, "tensor": 4}]
EXPERT_MESHES = [*MESHES, {"expert": 4, "fsdp": 2}]
# Compiling is most of the time, and what is compiled here runs once.
QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    cases = {
        name: [str(save_family(name, folder / name)), EXPERT_MESHES if name in ("mixtral", "qwen3_moe") else MESHES]
        for name in CONFIGS
    }
    environment = os.environ | device.jax_environment("cpu", local_devices=8)
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {QUICK_COMPILATION}"
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent.parent), str(HERE)])
    done = subprocess.run(
        [sys.executable, HERE / "family_script.py", json.dumps(cases)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rsplit("RESULT ", 1)[1])


@pytest.mark.parametrize("name", CONFIGS)
def test_eight_devices_equal_one(results, name):
    expected, *others = np.array(results[name])
    assert np.isfinite(expected).all()
    assert (expected[0] != expected[2]).any()
    for mesh, steps in zip(EXPERT_MESHES[1:], others, strict=False):
        np.testing.assert_allclose(steps, expected, rtol=1e-4, atol=1e-4, err_msg=str(mesh))
