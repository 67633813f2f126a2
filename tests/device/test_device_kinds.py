"""What kinds of devices can do, the chips' peaks, and the environment that makes JAX use them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import device
from device import DeviceError


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD-Instinct-MI325X", "MI325X"),
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5e", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v5p", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU7x", "TPU v7x"),
        ("TPU v7x", "TPU v7x"),
    ],
)
def test_known_chips(name: str, chip: str) -> None:
    found = device.find_chip(name)
    assert found is not None
    assert found.name == chip


@pytest.mark.parametrize("name", [None, "", "cpu", "NVIDIA GeForce RTX 4090", "TPU v4 lite", "Ascend910B", "TPU v9"])
def test_unknown_chips_have_no_peaks(name: str | None) -> None:
    assert device.find_chip(name) is None


def test_capabilities() -> None:
    assert [device.capabilities(kind).ray_resource for kind in device.KINDS] == ["GPU", "GPU", "NPU", "TPU", "CPU"]
    assert not device.capabilities("tpu").splittable
    assert device.capabilities("cpu").dtypes[0] == "float32"
    with pytest.raises(DeviceError, match=r"trainer\.device=gpu: must be one of auto, cuda"):
        device.capabilities("gpu")


@pytest.mark.parametrize("kind", ["cuda", "rocm", "npu", "tpu"])
def test_environment_of_accelerators(kind: str) -> None:
    assert device.jax_environment(kind, local_devices=4) == {"JAX_PLATFORMS": f"{kind},cpu"}


def test_devices_that_two_processes_take_turns_on() -> None:
    for kind in ("cuda", "rocm", "npu", "cpu"):
        device.check_shareable(kind, "some.key=true")
    with pytest.raises(DeviceError, match=r"some\.key=true: .* same TPU devices, .*set some\.key=false"):
        device.check_shareable("tpu", "some.key=true")
    shared = device.jax_environment("cuda", local_devices=1, shared=True, environment={})
    assert shared["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform"
    assert device.visible_environment("rocm", ["1", "3"]) == {"HIP_VISIBLE_DEVICES": "1,3"}
    assert device.visible_environment("cpu", []) == {}


def test_environment_of_virtual_devices_in_real_jax() -> None:
    flags = "--xla_force_host_platform_device_count=7 --xla_cpu_enable_fast_math=false"
    variables = device.jax_environment("cpu", local_devices=3, environment={"XLA_FLAGS": flags})
    assert variables["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"
    code = "import jax; d = jax.devices(); print(len(d), d[0].platform, *(m.kind for m in d[0].addressable_memories()))"
    out = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, check=True, capture_output=True, text=True
    ).stdout.split()
    assert out[:2] == ["3", "cpu"]
    assert set(device.capabilities("cpu").memory_kinds) <= set(out[2:])
