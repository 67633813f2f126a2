"""What travels between the pool and a reward process: frames of this header and a payload, the first one a Setup."""

from __future__ import annotations

import dataclasses
import struct

from jaxrl_ppo.rewards.methods import MethodSpec

HEADER = struct.Struct(">Q")  # length of the payload that follows


@dataclasses.dataclass(frozen=True)
class Setup:
    """The first thing a reward process is told."""

    method: MethodSpec
    timeout_s: float  # for one call
    memory_mb: int | None  # for the process
