"""The same updates on one device and on many, in one process and in two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import device

HERE = Path(__file__).parent


def run(model, meshes=({},), devices=1, processes=1, settings=None, save=None, restore=None, steps=3):
    """What `update_script.py` prints, from each process: a result for each mesh."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | device.jax_environment("cpu", local_devices=devices)
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent.parent), str(HERE)])
    arguments = {
        "model": str(model),
        "meshes": list(meshes),
        "settings": settings or {},
        "processes": processes,
        "coordinator": coordinator,
        "save": save and str(save),
        "restore": restore and str(restore),
        "steps": steps,
    }
    running = [
        subprocess.Popen(
            [sys.executable, str(HERE / "update_script.py"), json.dumps(arguments | {"rank": rank})],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    results = []
    for process in running:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        results.append(json.loads(out.rsplit("RESULT ", 1)[1]))
    return results


COMPARED = (
    *("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/ppo_kl", "actor/grad_norm", "log_prob", "ref"),
    *("critic/vf_loss", "critic/vpred_mean", "critic/grad_norm", "values"),
)


def assert_same(result, expected, tolerance=1e-4):
    assert len(result["steps"]) == len(expected["steps"])
    for step, (ours, theirs) in enumerate(zip(result["steps"], expected["steps"])):
        for name in COMPARED:
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), (step, name)
    assert result["probe"] == pytest.approx(expected["probe"], rel=tolerance, abs=tolerance)


MESHES = [
    {"fsdp": 8},
    {"fsdp": 2, "tensor": 4},
    {"fsdp": 2, "sequence": 4},
    {"fsdp": 2, "sequence": 2, "tensor": 2},
    {"replica": 2, "fsdp": 2, "tensor": 2},
]


@pytest.fixture(scope="module")
def one_device(tiny_model, tmp_path_factory):
    """Results on one device, and the folder with the state it saved at the end."""
    state = tmp_path_factory.mktemp("one_device") / "state"
    return run(tiny_model, save=state)[0][0], state


@pytest.fixture(scope="module")
def eight_devices(tiny_model):
    """Results on each of MESHES."""
    return run(tiny_model, MESHES, devices=8)[0]


@pytest.mark.parametrize("index", range(len(MESHES)), ids=[str(mesh) for mesh in MESHES])
def test_eight_devices_equal_one(one_device, eight_devices, index):
    assert_same(eight_devices[index], one_device[0])


def test_two_processes_equal_one_and_take_up_one_another_s_state(tiny_model, one_device, tmp_path):
    expected, state = one_device
    mesh = {"fsdp": 4, "sequence": 2}
    offload = {"fsdp_config__param_offload": True, "fsdp_config__optimizer_offload": True}
    (first,), (second,) = run(tiny_model, [mesh], devices=4, processes=2, settings=offload, save=tmp_path / "state")
    assert first == second
    assert_same(first, expected)
    for (restored,) in (
        *run(tiny_model, [{"fsdp": 2, "tensor": 4}], devices=4, processes=2, restore=state, steps=0),
        *run(tiny_model, restore=tmp_path / "state", steps=0),
    ):
        assert restored["probe"] == pytest.approx(expected["probe"], rel=1e-4, abs=1e-4)
