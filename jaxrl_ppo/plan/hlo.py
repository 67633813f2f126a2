"""Reads the text of an optimised XLA program: computations, instructions, shapes, and how often each loop turns."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_ARRAY = re.compile(r"(?P<type>[a-z][a-z0-9]*)\[(?P<dims>[\d,<=]*)\](?P<layout>\{[^{}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_BITS = re.compile(r"[a-z]+(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """One array of an instruction's result. `on_chip` ones lie in a core's own fast memory."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Its size, without padding."""
        if self.dtype in ("token", "opaque"):
            return 0
        if self.dtype == "pred":
            return self.elements
        bits = _BITS.match(self.dtype)
        return math.ceil(self.elements * int(bits[1]) / 8) if bits else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its results, what it does, to what, and the rest of its line."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    def called(self, *keys: str) -> list[str]:
        """Names of the computations that its attributes `keys` call."""
        found = []
        for key in keys:
            match = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
            if match:
                found += re.findall(r"[\w.\-]+", match[1].replace("%", ""))
        return found


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions, in an order in which they may run."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Its instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who takes each instruction's result."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Every computation by name; `entry` is where it starts."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Program:
    """The program of `jax.stages.Compiled.as_text()`. Raises ValueError when it holds no entry computation."""
    computations: dict[str, Computation] = {}
    entry = None
    name: str | None = None
    instructions: list[Instruction] = []
    for line in text.splitlines():
        if name is None:
            header = _HEADER.match(line)
            if header:
                name, instructions = header["name"], []
                entry = name if header["entry"] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(instructions))
            name = None
        elif match := _INSTRUCTION.match(line):
            instructions.append(_instruction(match))
    if entry is None:
        raise ValueError("this is not the text of an XLA program: it has no ENTRY computation")
    return Program(computations, entry)


def trip_count(loop: Instruction, program: Program) -> int:
    """How often a `while` turns: as XLA found out, else as its condition compares a counter with a constant, else 1."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    (condition,) = loop.called("condition")
    constants = [
        int(match[1])
        for instruction in program.computations[condition].instructions
        if instruction.opcode == "constant" and (match := re.match(r"\(?(\d+)\)?", instruction.attributes))
    ]
    return max(constants, default=1)


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a result's type, e.g. `(f32[2,3]{1,0:T(8,128)S(1)}, s32[])`."""
    found = []
    for match in _ARRAY.finditer(shape):
        dims = tuple(int(size.lstrip("<=")) for size in match["dims"].split(",") if size)
        found.append(Array(match["type"], dims, "S(1)" in (match["layout"] or "")))
    return tuple(found)


def _instruction(match: re.Match[str]) -> Instruction:
    rest = match["rest"]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, call = rest[:end], rest[end:].lstrip()
    opening = call.index("(")
    closing = opening + _closing(call[opening:])
    inside = call[opening + 1 : closing]
    opcode = call[:opening]
    attributes = (inside if opcode in ("constant", "parameter") else "") + call[closing + 1 :]
    operands = tuple(_NAME.findall(inside))
    return Instruction(match["name"], opcode, arrays(shape), operands, attributes, bool(match["root"]))


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the one `text` begins with."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")
