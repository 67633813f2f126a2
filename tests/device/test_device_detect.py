"""Devices are found in faked machines: their /dev, /proc and /sys, environment and installed plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

import device
from device import DeviceError, Machine

H100 = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 100\n"


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Machine]:
    """`machine(files, environment, plugins)`: files are path → content below its root."""

    def make(
        files: Mapping[str, str], environment: Mapping[str, str] | None = None, plugins: tuple[str, ...] = ()
    ) -> Machine:
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        return Machine(tmp_path, environment or {}, plugins)

    return make


def gpus(count: int, information: str = H100) -> dict[str, str]:
    files = {f"dev/nvidia{i}": "" for i in range(count)} | {"dev/nvidiactl": "", "dev/nvidia-uvm": ""}
    return files | {f"proc/driver/nvidia/gpus/0000:0{i}:00.0/information": information for i in range(count)}


def tpus(count: int, pci: str = "0x0062") -> dict[str, str]:
    files = {f"dev/vfio/{i}": "" for i in range(count)} | {"dev/vfio/vfio": ""}
    for i in range(count):
        files |= {f"sys/bus/pci/devices/{i}/vendor": "0x1ae0\n", f"sys/bus/pci/devices/{i}/device": f"{pci}\n"}
    return files


def amd(count: int) -> dict[str, str]:
    files = {"dev/kfd": "", "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 96\nsimd_count 0\n"}
    files["sys/class/drm/card1/device/product_name"] = "AMD Instinct MI300X OAM\n"
    return files | {
        f"sys/class/kfd/kfd/topology/nodes/{i + 1}/properties": "simd_count 1216\ngfx_target_version 90402\n"
        for i in range(count)
    }


def test_nothing_but_a_cpu(machine: Callable[..., Machine]) -> None:
    (found,) = device.detect(machine({"proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU\n"}))
    assert (found.kind, found.name, found.chip) == ("cpu", "Some CPU", None)
    assert found.count >= 1


def test_cuda(machine: Callable[..., Machine]) -> None:
    here = machine(gpus(8), plugins=("xla_cuda13",))
    best = device.choose(here)
    assert (best.kind, best.count, best.name, best.plugin) == ("cuda", 8, "NVIDIA H100 80GB HBM3", "xla_cuda13")
    assert best.chip is not None
    assert best.chip.bf16_flops == 989e12
    assert device.local_devices("cuda", here) == 8
    assert device.local_devices("tpu", here) == 0
    assert device.local_devices("cpu", here) is None


@pytest.mark.parametrize(("visible", "count"), [("0,3", 2), ("", 0), ("-1", 0), ("GPU-aaa,GPU-bbb,GPU-ccc", 3)])
def test_cuda_visible_devices(machine: Callable[..., Machine], visible: str, count: int) -> None:
    here = machine(gpus(4), {"CUDA_VISIBLE_DEVICES": visible}, ("xla_cuda13",))
    assert device.local_devices("cuda", here) == count
    assert device.choose(here).kind == ("cuda" if count else "cpu")


def test_gpus_of_another_container_do_not_count(machine: Callable[..., Machine]) -> None:
    files = {
        name: text for name, text in gpus(8).items() if name != "dev/nvidia0" and not name.startswith("dev/nvidia")
    }
    assert device.choose(machine(files)).kind == "cpu"


def test_wsl(machine: Callable[..., Machine]) -> None:
    here = machine({"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""}, plugins=("xla_cuda13",))
    assert device.choose(here).count == 1


def test_rocm(machine: Callable[..., Machine]) -> None:
    best = device.choose(machine(amd(4), {"HIP_VISIBLE_DEVICES": "0,1,2"}, ("xla_rocm7",)))
    assert (best.kind, best.count, best.name) == ("rocm", 3, "AMD Instinct MI300X OAM")
    assert best.chip is not None
    assert best.chip.name == "MI300X"


@pytest.mark.parametrize(
    ("pci", "chip"),
    [("0x005e", "TPU v4"), ("0x0062", "TPU v5p"), ("0x0063", "TPU v5e"), ("0x006f", "TPU v6e"), ("0x0076", "TPU v7x")],
)
def test_tpu_on_the_pci_bus(machine: Callable[..., Machine], pci: str, chip: str) -> None:
    best = device.choose(machine(tpus(4, pci), plugins=("libtpu",)))
    assert (best.kind, best.count) == ("tpu", 4)
    assert best.chip is not None
    assert best.chip.name == chip


def test_tpu_by_environment(machine: Callable[..., Machine]) -> None:
    files = {f"dev/accel{i}": "" for i in range(8)}
    best = device.choose(machine(files, {"TPU_ACCELERATOR_TYPE": "v5litepod-8"}, ("libtpu",)))
    assert (best.kind, best.count, best.name) == ("tpu", 8, "TPU v5e")


def test_vfio_files_of_other_hardware_are_no_tpu(machine: Callable[..., Machine]) -> None:
    files = {"dev/vfio/7": "", "sys/bus/pci/devices/0/vendor": "0x8086\n", "sys/bus/pci/devices/0/device": "0x0062\n"}
    assert device.choose(machine(files, plugins=("libtpu",))).kind == "cpu"


def test_npu(machine: Callable[..., Machine]) -> None:
    files = {f"dev/davinci{i}": "" for i in range(8)} | {"dev/davinci_manager": ""}
    best = device.choose(machine(files, {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}, ("ascend_npu",)))
    assert (best.kind, best.count, best.plugin) == ("npu", 2, "ascend_npu")


@pytest.mark.parametrize(
    ("files", "installed", "what_to_do"),
    [
        ({"dev/davinci0": ""}, ("xla_cuda13", "libtpu"), "install a PJRT plugin for Ascend"),
        (gpus(1), ("libtpu",), device.pip_install("cuda")),
        (tpus(1), (), device.pip_install("tpu")),
        (amd(1), ("xla_cuda13",), "install AMD's jax-rocm plugin"),
    ],
)
def test_devices_without_a_plugin(
    machine: Callable[..., Machine], files: dict[str, str], installed: tuple[str, ...], what_to_do: str
) -> None:
    with pytest.raises(DeviceError) as caught:
        device.choose(machine(files, plugins=installed))
    assert what_to_do in str(caught.value)
    assert "set trainer.device=cpu" in str(caught.value)


def test_plugins_installed_here() -> None:
    assert "libtpu" in Machine.this().plugins  # a requirement of the tests


def settings(trainer: str, rollout: str | None = None) -> SimpleNamespace:
    rollout_section = SimpleNamespace(rollout=SimpleNamespace(device=rollout))
    return SimpleNamespace(trainer=SimpleNamespace(device=trainer), actor_rollout_ref=rollout_section)


def test_auto_set_device(machine: Callable[..., Machine]) -> None:
    here = machine(gpus(1), plugins=("xla_cuda13",))
    config = settings("auto", "auto")
    device.auto_set_device(config, machine=here)
    assert (config.trainer.device, config.actor_rollout_ref.rollout.device) == ("cuda", "cuda")
    config = settings("cpu")
    device.auto_set_device(config, machine=here)
    assert (config.trainer.device, config.actor_rollout_ref.rollout.device) == ("cpu", None)


def test_an_override_needs_no_plugin_of_what_is_there(machine: Callable[..., Machine]) -> None:
    device.auto_set_device(settings("cpu"), machine=machine({"dev/davinci0": ""}))


@pytest.mark.parametrize(
    ("resources", "kind"),
    [
        ({"CPU": 8.0, "GPU": 8.0, "accelerator_type:H100": 1.0}, "cuda"),
        ({"CPU": 8.0, "GPU": 8.0, "accelerator_type:AMD-Instinct-MI300X-OAM": 1.0}, "rocm"),
        ({"CPU": 8.0, "TPU": 16.0, "GPU": 8.0, "TPU-v5p-32-head": 1.0}, "tpu"),
        ({"NPU": 8.0}, "npu"),
        ({"CPU": 8.0, "memory": 1.0}, "cpu"),
    ],
)
def test_a_cluster_decides(machine: Callable[..., Machine], resources: dict[str, float], kind: str) -> None:
    config = settings("auto")
    device.auto_set_device(config, resources=resources, machine=machine(gpus(1)))
    assert config.trainer.device == kind


def test_check_local_devices(machine: Callable[..., Machine]) -> None:
    here = machine(gpus(2), plugins=())
    device.check_local_devices({"cuda": 2, "cpu": 64}, "keys", machine=here)
    with pytest.raises(DeviceError, match=r"3 CUDA device\(s\) are needed here \(these keys\), and this machine has 2"):
        device.check_local_devices({"cuda": 3}, "these keys", machine=here)
    with pytest.raises(DeviceError, match=r"1 TPU device.* this machine has 0"):
        device.check_local_devices({"tpu": 1}, "keys", machine=here)
    with pytest.raises(DeviceError, match="JAX has no plugin"):
        device.check_local_devices({"cuda": 2}, "keys", jax_kinds={"cuda"}, machine=here)
