"""What the known accelerator chips can do at most, from their makers' data sheets; for MFU and rooflines."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """Peaks of one JAX device: dense bf16 FLOP/s, memory bytes per second, memory bytes.

    A TPU v7x chip shows up as two JAX devices; its entry is for one of them.
    """

    name: str
    bf16_flops: float
    memory_bandwidth: float
    memory_bytes: float


GB, GIB, TB, TERA = 1e9, 2.0**30, 1e12, 1e12

# First match wins, so the particular comes before the general. Patterns meet lower-case names from NVIDIA's driver
# ("NVIDIA H100 80GB HBM3"), the kernel's AMD product names, Ray's accelerator types and JAX's device kinds.
_CHIPS = (
    (r"gb200", Chip("GB200", 2500 * TERA, 8.0 * TB, 186 * GB)),
    (r"b300", Chip("B300", 2250 * TERA, 8.0 * TB, 288 * GB)),
    (r"b200", Chip("B200", 2250 * TERA, 8.0 * TB, 180 * GB)),
    (r"gh200|h200", Chip("H200", 989 * TERA, 4.8 * TB, 141 * GB)),
    (r"h100.*nvl", Chip("H100 NVL", 835 * TERA, 3.9 * TB, 94 * GB)),
    (r"h100.*pcie", Chip("H100 PCIe", 756 * TERA, 2.0 * TB, 80 * GB)),
    (r"h100|h800", Chip("H100", 989 * TERA, 3.35 * TB, 80 * GB)),
    (r"a100.*80gb.*pcie", Chip("A100 PCIe 80GB", 312 * TERA, 1.935 * TB, 80 * GB)),
    (r"a[18]00.*80", Chip("A100 80GB", 312 * TERA, 2.039 * TB, 80 * GB)),
    (r"a100", Chip("A100 40GB", 312 * TERA, 1.555 * TB, 40 * GB)),
    (r"l40s", Chip("L40S", 362 * TERA, 0.864 * TB, 48 * GB)),
    (r"\bl4\b", Chip("L4", 121 * TERA, 0.3 * TB, 24 * GB)),
    (r"mi35[05]x", Chip("MI355X", 2517 * TERA, 8.0 * TB, 288 * GB)),
    (r"mi325x", Chip("MI325X", 1307 * TERA, 6.0 * TB, 256 * GB)),
    (r"mi300x", Chip("MI300X", 1307 * TERA, 5.3 * TB, 192 * GB)),
    (r"tpu ?v?7x?\b", Chip("TPU v7x", 1153 * TERA, 3.69 * TB, 96 * GIB)),
    (r"tpu.*v6 ?(e|lite)", Chip("TPU v6e", 918 * TERA, 1.64 * TB, 32 * GIB)),
    (r"tpu.*v5 ?(e|lite)", Chip("TPU v5e", 197 * TERA, 0.819 * TB, 16 * GIB)),
    (r"tpu.*v5p?", Chip("TPU v5p", 459 * TERA, 2.765 * TB, 95 * GIB)),
    (r"tpu.*v4(?! ?lite)", Chip("TPU v4", 275 * TERA, 1.228 * TB, 32 * GIB)),
)


def find_chip(name: str | None) -> Chip | None:
    """The chip that `name` means: a driver's name or `jax.Device.device_kind`; None when it is not known."""
    text = (name or "").lower().replace("_", " ")
    return next((chip for pattern, chip in _CHIPS if re.search(pattern, text)), None)
