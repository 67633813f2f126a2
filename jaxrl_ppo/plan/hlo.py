"""Reads the text of an optimised XLA program: computations, instructions, shapes, and how often each loop turns."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_END = re.compile(r"^\}(, execution_thread=.*)?\s*$")
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

    @property
    def root(self) -> Instruction:
        """What it returns."""
        return next(instruction for instruction in self.instructions if instruction.root)

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
    """The program of `jax.stages.Compiled.as_text()`, or of XLA's dump.

    Raises ValueError when it holds no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = None
    name: str | None = None
    instructions: list[str] = []
    for line in text.splitlines():
        if name is None:
            header = _HEADER.match(line)
            if header:
                name, instructions = header["name"], []
                entry = name if header["entry"] else entry
        elif _END.match(line):
            computations[name] = Computation(name, tuple(_instruction(each) for each in instructions))
            name = None
        elif _INSTRUCTION.match(line):
            instructions.append(line)
        elif instructions:  # what a kernel says of itself may go on over several lines, braces included
            instructions[-1] += line
    if entry is None:
        raise ValueError("this is not the text of an XLA program: it has no ENTRY computation")
    return Program(computations, entry)


def trip_count(loop: Instruction, parent: Computation, program: Program) -> int:
    """How often a `while` of the computation `parent` turns: as XLA found out, else as its counter runs, else 1.

    The counter is what the condition compares with a constant: from where the loop's operand has it, by what the body
    adds to it. Loops that the compiler has unrolled count by more than one.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    ends, turn = program.computations[condition], program.computations[body]
    compared = _compared(ends, program)
    if compared is None:
        return 1
    index, limit = compared
    start, step = 0, 1
    initial = parent.by_name[loop.operands[0]]
    if initial.opcode == "tuple":
        found = _constant(initial.operands[index], parent)
        start = start if found is None else found
    added = turn.by_name[turn.root.operands[index]] if turn.root.opcode == "tuple" else None
    if added is not None and added.opcode == "add":
        steps = [value for name in added.operands if (value := _constant(name, turn)) is not None]
        step = steps[0] if steps else step
    return max(0, math.ceil((limit - start) / step))


def _compared(condition: Computation, program: Program) -> tuple[int, int] | None:
    """The place of a loop's counter in its operand, and the constant it stays below; None if it is another test."""
    root, outside = condition.root, condition
    operands = list(root.operands)
    if root.opcode == "fusion":
        inner = program.computations[root.called("calls")[0]]
        root = inner.root
        # What the fused comparison takes, told in the condition's own names.
        places = {i.name: int(i.attributes.split(",")[0]) for i in inner.instructions if i.opcode == "parameter"}
        constants = {i.name: i for i in inner.instructions if i.opcode == "constant"}
        taken = [_through(name, inner) for name in root.operands]
        operands = [operands[places[name]] if name in places else name for name in taken]
        outside = Computation(condition.name, (*condition.instructions, *constants.values()))
    if root.opcode != "compare" or len(operands) != 2:
        return None
    counters = [outside.by_name.get(_through(name, outside)) for name in operands]
    limits = [_constant(name, outside) for name in operands]
    for counter, limit in zip(counters, reversed(limits)):
        if counter is not None and counter.opcode == "get-tuple-element" and limit is not None:
            place = re.search(r"\bindex=(\d+)", counter.attributes)
            inclusive = "direction=LE" in root.attributes or "direction=GE" in root.attributes
            return (int(place[1]), limit + inclusive) if place else None
    return None


def _through(name: str, computation: Computation) -> str:
    """What `name` is a copy of."""
    instruction = computation.by_name.get(name)
    while instruction is not None and instruction.opcode in ("copy", "bitcast", "convert"):
        name = instruction.operands[0]
        instruction = computation.by_name.get(name)
    return name


def _constant(name: str, computation: Computation) -> int | None:
    instruction = computation.by_name.get(_through(name, computation))
    if instruction is None or instruction.opcode != "constant":
        return None
    match = re.match(r"\{?(-?\d+)\}?(?=,|$)", instruction.attributes)
    return int(match[1]) if match else None


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a result's type, e.g. `(f32[2,3]{1,0:T(8,128)S(1)}, s32[])`."""
    found = []
    for match in _ARRAY.finditer(shape):
        dims = tuple(int(size.lstrip("<=")) for size in match["dims"].split(",") if size)
        found.append(Array(match["type"], dims, "S(1)" in (match["layout"] or "")))
    return tuple(found)


def _instruction(line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    assert match is not None
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
