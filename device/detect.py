"""Which devices this machine, or a Ray cluster, has; found without starting JAX."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from device.chips import Chip, find_chip
from device.kinds import DeviceError, capabilities

GOOGLE_PCI_VENDOR = "0x1ae0"
TPU_PCI_DEVICES = {
    "0x0027": "TPU v3",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU v7x",
}
# By which environment variable a process is allowed some of the devices only.
VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES"),
    "tpu": ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"),
}
# How the names of JAX's plugins tell which kind they are for.
PLUGIN_NAMES = {"cuda": r"cuda", "rocm": r"rocm", "npu": r"npu|ascend", "tpu": r"tpu"}


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Devices of one kind on this machine: how many a process may use, what they are, and how one can tell."""

    kind: str
    count: int
    name: str | None
    evidence: str
    plugin: str | None  # the installed JAX plugin for them

    @property
    def chip(self) -> Chip | None:
        """Peaks of one device; None when the chip is not known."""
        return find_chip(self.name)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where to look: the file system's root, the environment, and the names of the installed JAX plugins."""

    root: Path
    environment: Mapping[str, str]
    plugins: tuple[str, ...]

    @classmethod
    def this(cls) -> Machine:
        """The machine that this process runs on."""
        return cls(Path("/"), os.environ, installed_plugins())

    def paths(self, pattern: str) -> list[Path]:
        """Files that match, in order; `pattern` is relative to the root."""
        return sorted(self.root.glob(pattern))

    def read(self, path: Path) -> str:
        """A small file's text; empty when it cannot be read, as some device files cannot without privileges."""
        try:
            return path.read_text(errors="replace").strip()
        except OSError:
            return ""


def installed_plugins() -> tuple[str, ...]:
    """Names of the JAX plugins that are installed, as JAX itself would find them, and libtpu."""
    names = {entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")}
    spec = importlib.util.find_spec("jax_plugins")
    if spec is not None and spec.submodule_search_locations is not None:
        names |= {module.name for module in pkgutil.iter_modules(list(spec.submodule_search_locations))}
    if importlib.util.find_spec("libtpu") is not None:
        names.add("libtpu")
    by_path = os.environ.get("PJRT_NAMES_AND_LIBRARY_PATHS", "")
    names |= {pair.split(":")[0] for pair in by_path.split(",") if pair}
    return tuple(sorted(names))


def detect(machine: Machine | None = None) -> list[Found]:
    """The kinds of device here that this process may use, the one to prefer first; CPU is always there, and last."""
    machine = machine or Machine.this()
    found = [_tpu(machine), _npu(machine), _cuda(machine), _rocm(machine)]
    return [kind for kind in found if kind is not None and kind.count > 0] + [_cpu(machine)]


def choose(machine: Machine | None = None) -> Found:
    """The devices that `trainer.device=auto` means. Raises DeviceError when JAX has no plugin for them."""
    best = detect(machine)[0]
    require_plugin(best)
    return best


def require_plugin(found: Found) -> None:
    """Raise DeviceError, saying what to install, when JAX cannot drive the devices found."""
    if found.plugin is None and found.kind != "cpu":
        install = capabilities(found.kind).install
        raise DeviceError(
            f"this machine has {found.count} {found.kind.upper()} device(s) ({found.evidence}), but JAX has no plugin "
            f"for them: {install}. To leave them alone, set trainer.device=cpu."
        )


def local_devices(kind: str, machine: Machine | None = None) -> int | None:
    """How many devices of `kind` this machine lets us use; None for CPU, where a device is virtual."""
    if kind == "cpu":
        return None
    return next((found.count for found in detect(machine) if found.kind == kind), 0)


def visible_environment(kind: str, ids: Sequence[str]) -> dict[str, str]:
    """The environment variable by which a process is allowed these devices of its host only; none for CPU."""
    return {VISIBLE[kind][0]: ",".join(ids)} if ids and kind in VISIBLE else {}


def kind_in_cluster(resources: Mapping[str, float]) -> str:
    """The kind of device that a Ray cluster with these resources (`ray.cluster_resources()`) is for."""
    if resources.get("TPU"):
        return "tpu"
    if resources.get("NPU"):
        return "npu"
    if resources.get("GPU"):
        return "rocm" if any(name.startswith("accelerator_type:AMD") for name in resources) else "cuda"
    return "cpu"


def _found(machine: Machine, kind: str, count: int, name: str | None, evidence: str) -> Found | None:
    """What was found, less what the environment hides; None for nothing."""
    if not count:
        return None
    for variable in VISIBLE.get(kind, ()):
        if variable in machine.environment:
            visible = [item for item in machine.environment[variable].split(",") if item.strip() not in ("", "-1")]
            count = min(count, len(visible))
            evidence += f", {variable}={machine.environment[variable]}"
    plugin = next((name for name in machine.plugins if re.search(PLUGIN_NAMES[kind], name.lower())), None)
    return Found(kind, count, name, evidence, plugin)


def _cuda(machine: Machine) -> Found | None:
    devices = [path for path in machine.paths("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    information = [machine.read(path) for path in machine.paths("proc/driver/nvidia/gpus/*/information")]
    models = [match.group(1).strip() for text in information if (match := re.search(r"Model:(.*)", text))]
    count, evidence = len(devices), f"/dev/{devices[0].name}" if devices else ""
    if not devices and (machine.root / "dev/dxg").exists() and (machine.root / "usr/lib/wsl/lib/libcuda.so.1").exists():
        count, evidence = 1, "/dev/dxg with NVIDIA's driver for WSL"
    return _found(machine, "cuda", count, models[0] if models else None, evidence)


def _rocm(machine: Machine) -> Found | None:
    if not (machine.root / "dev/kfd").exists():
        return None
    nodes = [machine.read(path) for path in machine.paths("sys/class/kfd/kfd/topology/nodes/*/properties")]
    gpus = [text for text in nodes if (match := re.search(r"simd_count (\d+)", text)) and int(match.group(1))]
    names = [machine.read(path) for path in machine.paths("sys/class/drm/card*/device/product_name")]
    name = next((text for text in names if "instinct" in text.lower() or "radeon" in text.lower()), None)
    return _found(machine, "rocm", len(gpus), name, "/dev/kfd")


def _npu(machine: Machine) -> Found | None:
    devices = [path for path in machine.paths("dev/davinci*") if re.fullmatch(r"davinci\d+", path.name)]
    return _found(machine, "npu", len(devices), None, f"/dev/{devices[0].name}" if devices else "")


def _tpu(machine: Machine) -> Found | None:
    chips = [
        TPU_PCI_DEVICES[device]
        for path in machine.paths("sys/bus/pci/devices/*/vendor")
        if machine.read(path) == GOOGLE_PCI_VENDOR
        and (device := machine.read(path.parent / "device")) in TPU_PCI_DEVICES
    ]
    nodes = [path for path in machine.paths("dev/accel*") if re.fullmatch(r"accel\d+", path.name)]
    nodes = nodes or [path for path in machine.paths("dev/vfio/*") if path.name.isdigit()]
    if chips and nodes:  # without device files the chips belong to another container
        return _found(machine, "tpu", len(chips), chips[0], f"{len(chips)} {chips[0]} on the PCI bus")
    accelerator = machine.environment.get("TPU_ACCELERATOR_TYPE")  # set on TPU hosts of GKE, where /sys may be hidden
    if accelerator and nodes:
        generation = accelerator.split("-")[0].replace("v5litepod", "v5e")
        return _found(machine, "tpu", len(nodes), f"TPU {generation}", f"TPU_ACCELERATOR_TYPE={accelerator}")
    return None


def _cpu(machine: Machine) -> Found:
    model = re.search(r"model name\s*:\s*(.*)", machine.read(machine.root / "proc/cpuinfo"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Found("cpu", cores, model.group(1) if model else None, f"{cores} cores", None)
