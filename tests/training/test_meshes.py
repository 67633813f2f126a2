"""The same updates on one device and on many, in one process and in two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jax_processes import run_script

HERE = Path(__file__).parent


def run(model, meshes=({},), devices=1, processes=1, settings=None, save=None, restore=None, steps=3):
    """What `update_script.py` prints, from each process: a result for each mesh."""
    arguments = {
        "model": str(model),
        "meshes": list(meshes),
        "settings": settings or {},
        "processes": processes,
        "save": save and str(save),
        "restore": restore and str(restore),
        "steps": steps,
    }
    return run_script(
        HERE / "update_script.py",
        lambda rank, coordinator: [json.dumps(arguments | {"rank": rank, "coordinator": coordinator})],
        devices=devices,
        processes=processes,
    )


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
