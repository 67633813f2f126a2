"""The devices of a topology that need not be here: TPU slices through libtpu, virtual CPU devices."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

from device import pip_install
from jaxrl_ppo.schema.faults import trimmed

if TYPE_CHECKING:
    import jax

KEY = "plan.topology"
GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
_PATTERN = re.compile(r"(?P<kind>[a-z0-9]+):(?P<grid>\d+(x\d+)*)")

# What one chip can send over its links to other chips, bytes a second, all links together and in one direction, from
# Google's data sheets (which give both directions together), by JAX's device kind.
INTERCONNECT = {
    "TPU v4": 300e9,
    "TPU v5 lite": 200e9,
    "TPU v5": 600e9,
    "TPU v6 lite": 400e9,
    "TPU7x": 600e9,
}


class TopologyError(ValueError):
    """A topology that cannot be compiled for here."""


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """`name` as given, the kind of device ("tpu" or "cpu") and how many."""

    name: str
    kind: str
    devices: int

    def environment(self) -> dict[str, str]:
        """Environment variables to set before jax is imported: no device is looked for, none is taken."""
        import device

        environment = device.jax_environment("cpu", local_devices=self.devices if self.kind == "cpu" else 1)
        if self.kind == "tpu":
            # libtpu asks no metadata server, takes no lock on hardware it will not use, and keeps its log to itself.
            environment |= {
                "TPU_SKIP_MDS_QUERY": "1",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                "TPU_ACCELERATOR_TYPE": "v5litepod-1",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_WORKER_ID": "0",
                "TPU_MIN_LOG_LEVEL": "3",
                "TPU_STDERR_LOG_LEVEL": "3",
                "TPU_LOG_DIR": "disabled",
                "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program from there has no dump to read
            }
        return environment

    def open(self) -> list[jax.Device]:
        """Its devices, for compiling only. Raises TopologyError when libtpu is missing or does not know it."""
        import jax
        from jax.experimental import topologies

        if self.kind == "cpu":
            return jax.devices("cpu")
        try:
            return list(topologies.get_topology_desc(topology_name=self.name, platform="tpu").devices)
        except (ImportError, RuntimeError, ValueError, AssertionError, OSError) as error:
            raise TopologyError(
                f"{KEY}={self.name}: libtpu does not give this topology: {trimmed(error)}. It must be installed "
                f"({pip_install('tpu')}), and the slice one that Google offers."
            ) from error


def parse(text: str) -> Topology:
    """`v5e:8x8`, `v5p:4x4x4`, `v6e:16x16`, … or `cpu:8`. Raises TopologyError."""
    match = _PATTERN.fullmatch(text.strip().lower())
    if match is None or match["kind"] not in (*GENERATIONS, "cpu"):
        known = ", ".join(GENERATIONS)
        raise TopologyError(
            f"{KEY}={text}: must be a TPU slice as generation:grid ({known}; v5e:8x8, v5p:4x4x4) or cpu:N"
        )
    devices = math.prod(int(side) for side in match["grid"].split("x"))
    if devices < 1:
        raise TopologyError(f"{KEY}={text}: has no devices")
    return Topology(match[0], "cpu" if match["kind"] == "cpu" else "tpu", devices)
