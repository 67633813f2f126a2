"""Every family: the same updates on one device and on eight, whichever way they divide the work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from family_models import CONFIGS, save_family

import device

HERE = Path(__file__).parent
TENSOR, EXPERT, DATA = {"fsdp": 2, "tensor": 4}, {"expert": 4, "fsdp": 2}, {"fsdp": 8}
# The first is what the others are compared with. Llama with all its weights is test_meshes' business, here it has a
# LoRA adapter; data parallelism alone, which knows nothing of families, is tried on the ones with the most to go wrong.
# Run as a program, this file takes every family to every mesh.
MODEL = {"llama": {"lora_rank": 4}}
MESHES = {name: [{"fsdp": 1}, TENSOR] for name in CONFIGS}
MESHES["qwen3_moe"] = [{"fsdp": 1}, TENSOR, EXPERT, DATA]
MESHES["mixtral"] = [{"fsdp": 1}, EXPERT]
MESHES["gemma2"] = [{"fsdp": 1}, TENSOR, DATA]
EVERY_MESH = {name: [{"fsdp": 1}, DATA, TENSOR, EXPERT] for name in CONFIGS}
# Compiling is most of the time, and what is compiled here runs once.
QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def run(folder, meshes):
    cases = {
        name: [str(save_family(name, folder / name)), sizes, MODEL.get(name, {})] for name, sizes in meshes.items()
    }
    environment = os.environ | device.jax_environment("cpu", local_devices=8)
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {QUICK_COMPILATION}"
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent.parent), str(HERE)])
    script = [sys.executable, HERE / "family_script.py", json.dumps(cases)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rsplit("RESULT ", 1)[1])


def check(results, meshes):
    expected, *others = np.array(results)
    assert np.isfinite(expected).all()
    assert (expected[0] != expected[2]).any()
    for mesh, steps in zip(meshes[1:], others, strict=True):
        np.testing.assert_allclose(steps, expected, rtol=1e-4, atol=1e-4, err_msg=str(mesh))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(tmp_path_factory.mktemp("families"), MESHES)


@pytest.mark.parametrize("name", MESHES)
def test_eight_devices_equal_one(results, name):
    check(results[name], MESHES[name])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for family, numbers in run(Path(temporary), EVERY_MESH).items():
            check(numbers, EVERY_MESH[family])
            print(family, "equal on", *EVERY_MESH[family])
