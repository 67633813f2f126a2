"""Every family: the same updates on one device and on eight, whichever way they divide the work.

Run as a program, with PYTHONPATH=.:tests, this file takes every family to every mesh, in one process of eight devices
and in two of four.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from family_models import CONFIGS, save_family
from jax_processes import run_script

HERE = Path(__file__).parent
ONE, DATA = {"fsdp": 1}, {"fsdp": 8}
TENSOR, SEQUENCE = {"fsdp": 2, "tensor": 4}, {"fsdp": 2, "sequence": 4}
MIXED, EXPERT = {"fsdp": 2, "sequence": 2, "tensor": 2}, {"fsdp": 2, "expert": 4}
# The first is what the others are compared with. Llama with all its weights is test_meshes' business, here it has a
# LoRA adapter. Data parallelism knows nothing of families, and is left to the ones with the most to go wrong.
MODEL = {"llama": {"lora_rank": 4}}
MESHES = {name: [ONE, TENSOR] for name in CONFIGS}
MESHES |= {
    "mistral": [ONE, SEQUENCE],
    "gemma2": [ONE, MIXED, DATA],
    "gemma3": [ONE, MIXED],
    "mixtral": [ONE, EXPERT],
    "qwen3_moe": [ONE, MIXED, EXPERT],
}
EVERY_MESH = [ONE, DATA, TENSOR, SEQUENCE, MIXED, EXPERT]
TWO_PROCESSES = [{"fsdp": 4, "sequence": 2}, {"fsdp": 2, "sequence": 2, "tensor": 2}, EXPERT]
# Compiling is most of the time, and what is compiled here runs once.
QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def run(folder, meshes, processes=1):
    """What `family_script.py` prints in each process: by family, results on each of its meshes."""
    cases = {
        name: [str(save_family(name, folder / name)), sizes, MODEL.get(name, {})] for name, sizes in meshes.items()
    }
    return run_script(
        HERE / "family_script.py",
        lambda rank, coordinator: [json.dumps(cases), *([processes, rank, coordinator] if processes > 1 else [])],
        devices=8 // processes,
        processes=processes,
        flags=QUICK_COMPILATION,
        timeout=1800,
    )


def check(expected, results, meshes):
    """`results` on `meshes`, each against those on one device."""
    expected = np.array(expected)
    assert np.isfinite(expected).all()
    assert (expected[0] != expected[2]).any()
    for mesh, steps in zip(meshes, results, strict=True):
        np.testing.assert_allclose(steps, expected, rtol=1e-4, atol=1e-4, err_msg=str(mesh))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(tmp_path_factory.mktemp("families"), MESHES)[0]


@pytest.mark.parametrize("name", MESHES)
def test_eight_devices_equal_one(results, name):
    expected, *others = results[name]
    check(expected, others, MESHES[name][1:])


def main(families):
    """Every mesh for `families`, printed as they pass."""
    for family in families:
        with tempfile.TemporaryDirectory() as temporary:
            (alone,) = run(Path(temporary), {family: EVERY_MESH})
            expected, *others = alone[family]
            check(expected, others, EVERY_MESH[1:])
            print(family, "equal on", *EVERY_MESH[1:], flush=True)
            for together in run(Path(temporary), {family: TWO_PROCESSES}, processes=2):
                check(expected, together[family], TWO_PROCESSES)
            print(family, "equal in two processes on", *TWO_PROCESSES, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or CONFIGS)
