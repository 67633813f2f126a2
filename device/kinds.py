"""What each kind of device can do, as far as the trainer has to know before it starts there."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from device.install import pip_install

EMULATE = "JAXRL_PPO_EMULATE"
KINDS = ("cuda", "rocm", "npu", "tpu", "cpu")


class DeviceError(RuntimeError):
    """The devices asked for cannot be used; the message says what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Capabilities:
    """One kind of device.

    `ray_resource` is what Ray counts it as. `splittable` says whether a host's devices may be divided among several
    processes; where they may not, one process drives all of them. `shareable` says whether two processes may have the
    same device open. `attention` names the attention kernel. `dtypes`
    are the computation types, the best first. `memory_kinds` are JAX's names of memories that arrays can be put in,
    the default first. `install` says what brings JAX's support for it.
    """

    kind: str
    ray_resource: str
    splittable: bool
    shareable: bool
    attention: str
    dtypes: tuple[str, ...]
    memory_kinds: tuple[str, ...]
    install: str


_CAPABILITIES = {
    "cuda": Capabilities(
        "cuda",
        "GPU",
        splittable=True,
        shareable=True,
        attention="cudnn",
        dtypes=("bfloat16", "float16", "float32"),
        memory_kinds=("device", "pinned_host"),
        install=pip_install("cuda"),
    ),
    "rocm": Capabilities(
        "rocm",
        "GPU",
        splittable=True,
        shareable=True,
        attention="xla",
        dtypes=("bfloat16", "float16", "float32"),
        memory_kinds=("device", "pinned_host"),
        install="install AMD's jax-rocm plugin and PJRT packages for your ROCm and JAX versions",
    ),
    "npu": Capabilities(
        "npu",
        "NPU",
        splittable=True,
        shareable=True,
        attention="xla",
        dtypes=("bfloat16", "float16", "float32"),
        memory_kinds=("device",),
        install=(
            "install a PJRT plugin for Ascend that fits your CANN release: a package with an npu or ascend entry in "
            "the entry-point group jax_plugins, or a library named by PJRT_NAMES_AND_LIBRARY_PATHS=npu:/path/to/it.so"
        ),
    ),
    "tpu": Capabilities(
        "tpu",
        "TPU",
        splittable=False,
        shareable=False,
        attention="splash",
        dtypes=("bfloat16", "float32"),
        memory_kinds=("device", "pinned_host"),
        install=pip_install("tpu"),
    ),
    "cpu": Capabilities(
        "cpu",
        "CPU",
        splittable=True,
        shareable=True,
        attention="xla",
        dtypes=("float32", "bfloat16"),
        memory_kinds=("device", "pinned_host"),
        install="nothing to install",
    ),
}


def capabilities(kind: str) -> Capabilities:
    """What devices of `kind` can do. Raises DeviceError for a kind that does not exist."""
    if kind not in _CAPABILITIES:
        raise DeviceError(f"trainer.device={kind}: must be one of auto, {', '.join(KINDS)}")
    return _CAPABILITIES[kind]


def jax_environment(
    kind: str, *, local_devices: int, shared: bool = False, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment variables for a process that drives `local_devices` devices of `kind` with JAX.

    With `shared` another process has the same devices: JAX then takes memory as it needs it, and gives it back.

    They must be set before the process imports jax. `environment` (default: this process's) is what they are merged
    with. On CPU a device is a virtual one: the process gets as many as it is told. With JAXRL_PPO_EMULATE=1 those of
    other kinds are virtual too, to rehearse a placement where there are none.
    """
    capabilities(kind)
    environment = os.environ if environment is None else environment
    if kind != "cpu" and environment.get(EMULATE) != "1":
        variables = {"JAX_PLATFORMS": f"{kind},cpu"}  # cpu stays, for arrays that rest on the host
        # By default it takes three quarters of a GPU at its start, and keeps what it was ever given.
        return variables | ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"} if shared else {})
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", environment.get("XLA_FLAGS", ""))
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(local_devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": " ".join(flags.split()),
    }
