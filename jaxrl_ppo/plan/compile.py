"""Compiles one program ahead of time and reads off what it takes from a chip."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxrl_ppo.plan import hlo
from jaxrl_ppo.plan.arithmetic import matrix_flops
from jaxrl_ppo.plan.costs import Cost, cost_of
from jaxrl_ppo.plan.workload import Work, bytes_per_chip

if TYPE_CHECKING:
    from device.chips import Chip

# What libtpu says when a program needs more than a chip has, in its older words and its newer ones.
_EXHAUSTED = re.compile(r"(?:Used |required for HLO temporaries \()([\d.]+)([KMGT]?)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one chip while a program runs. `resident` is the run's, the rest the program's own.

    `outputs` are those that take no argument's place; where the compiler gave up, they are not known.
    """

    arguments: float
    outputs: float
    temporaries: float
    code: float
    resident: float

    @property
    def peak(self) -> float:
        """All of it together."""
        return self.arguments + self.outputs + self.temporaries + self.code + self.resident


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A compiled program: what it takes, and what it costs: None where the compiler gave up for want of memory.

    `flops` are a chip's share of the traced program's matrix products.
    """

    work: Work
    memory: Memory
    cost: Cost | None
    flops: float
    compile_seconds: float


def measure(work: Work, chip: Chip | None, devices: int, experts: int) -> Measured:
    """Compile `work` for the devices that its arguments lie on; raises what the compiler raises but want of memory.

    `experts` is how many the model has, 0 if it is no mixture.
    """
    begin = time.perf_counter()
    resident = sum(work.resident.values())
    with tempfile.TemporaryDirectory() as folder:
        # A libtpu newer than jaxlib has instructions that `as_text` cannot read back; its own dump has them as text.
        options = None if chip is None else {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            traced = work.function.trace(*work.arguments)
            flops = matrix_flops(traced.jaxpr.jaxpr, experts) / devices
            compiled = traced.lower().compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            needed = _EXHAUSTED.search(str(error))
            if needed is None:
                raise
            used = float(needed[1]) * _UNITS[needed[2]]
            arguments = bytes_per_chip(work.arguments)  # which it counts in
            memory = Memory(arguments, 0, max(0.0, used - arguments), 0, resident)
            return Measured(work, memory, None, flops, time.perf_counter() - begin)
        seconds = time.perf_counter() - begin
        dumped = next(Path(folder).glob("*.after_codegen.txt"), None)
        program = hlo.parse(compiled.as_text() if dumped is None else dumped.read_text())
    stats = compiled.memory_analysis()
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        resident=resident,
    )
    limits = {} if chip is None else {"peak_flops": chip.bf16_flops, "bandwidth": chip.memory_bandwidth}
    return Measured(work, memory, cost_of(program, experts=experts, **limits), flops, seconds)
