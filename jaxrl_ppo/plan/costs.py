"""What an optimised program costs one device: arithmetic, memory traffic, collectives, and a roofline's time for them.

XLA's own cost analysis counts a loop's body once; here it counts as often as the loop turns, and collectives by kind.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

from jaxrl_ppo.plan.arithmetic import SPLASH_PRODUCTS
from jaxrl_ppo.plan.hlo import Computation, Instruction, Program, trip_count

# They name, select or wait for what is somewhere already.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "opt-barrier"),
    *("partition-id", "replica-id", "add-dependency", "domain", "send", "recv", "send-done", "recv-done"),
    *("async-done", "async-update", "copy-done", "all-gather-done", "all-reduce-done", "collective-permute-done"),
}
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(slots=True)
class Collective:
    """One kind of collective: how many run, what they bring to a device, and what a device has to send for it."""

    count: int = 0
    bytes: float = 0.0
    sent: float = 0.0


@dataclasses.dataclass(slots=True)
class Cost:
    """One device's share of a program. `seconds` is a roofline's time without the collectives."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    collectives: dict[str, Collective] = dataclasses.field(default_factory=dict)

    @property
    def sent(self) -> float:
        """Bytes that a device sends to others."""
        return sum(collective.sent for collective in self.collectives.values())

    def add(self, other: Cost, times: int = 1) -> None:
        """Take up `times` runs of `other`."""
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        self.seconds += times * other.seconds
        for kind, more in other.collectives.items():
            collective = self.collectives.setdefault(kind, Collective())
            collective.count += times * more.count
            collective.bytes += times * more.bytes
            collective.sent += times * more.sent


def cost_of(program: Program, *, peak_flops: float = math.inf, bandwidth: float = math.inf, experts: int = 0) -> Cost:
    """The cost of one run of `program` on one device that computes and reads at most so much a second.

    `experts` is how many the model has, as in `arithmetic.matrix_flops`.
    """
    return _Analysis(program, peak_flops, bandwidth, experts).computation(program.entry)


class _Analysis:
    def __init__(self, program: Program, peak_flops: float, bandwidth: float, experts: int):
        self.program, self.peak_flops, self.bandwidth, self.experts = program, peak_flops, bandwidth, experts
        self.known: dict[str, Cost] = {}

    def computation(self, name: str) -> Cost:
        if name not in self.known:
            total = Cost()
            computation = self.program.computations[name]
            for instruction in computation.instructions:
                total.add(self.instruction(instruction, computation))
            self.known[name] = total
        return self.known[name]

    def instruction(self, instruction: Instruction, computation: Computation) -> Cost:
        opcode = instruction.opcode
        cost = Cost()
        if opcode == "while":
            turns = trip_count(instruction, computation, self.program)
            for name in instruction.called("body", "condition"):
                cost.add(self.computation(name), turns)
        elif opcode == "conditional":
            branches = instruction.called("branch_computations", "true_computation", "false_computation")
            cost = max((self.computation(name) for name in branches), key=lambda c: (c.seconds, c.flops, c.bytes))
        elif opcode in ("call", "call-start", "async-start"):
            for name in instruction.called("to_apply", "calls", "called_computation", "called_computations"):
                cost.add(self.computation(name))
        elif opcode not in _FREE:
            cost.flops = self._flops(instruction, computation)
            kind = opcode.removesuffix("-start")
            if kind in _COLLECTIVES:
                if computation.name.startswith("all-reduce-scatter"):  # TPU's way to write a reduce-scatter
                    kind = "reduce-scatter"
                cost.collectives[kind] = _collective(kind, instruction, computation)
            cost.bytes = self._traffic(instruction, computation)
            if opcode == "fusion":
                (name,) = instruction.called("calls")
                if not self._continues(name):
                    cost.collectives = self.computation(name).collectives
                elif not cost.flops:
                    cost.bytes = 0.0  # the end of a collective: what it moves counted at its start
            cost.seconds = max(cost.flops / self.peak_flops, cost.bytes / self.bandwidth)
        return cost

    def _continues(self, name: str) -> bool:
        """Whether a fused computation goes on with a collective that another one has started, on TPU."""
        computation = self.program.computations[name]
        return name.startswith("async_collective_fusion") or any(
            '"AsyncCollectiveDone"' in instruction.attributes for instruction in computation.instructions
        )

    def _flops(self, instruction: Instruction, computation: Computation) -> float:
        """Of matrix products: what the peak is about."""
        if instruction.opcode == "fusion":
            if "ragged_dot_general" in instruction.attributes and "kind=kCustom" in instruction.attributes:
                return _ragged(instruction, computation, self.experts)
            return sum(self.computation(name).flops for name in instruction.called("calls"))
        if instruction.opcode == "dot":
            return _dot(instruction, computation)
        if instruction.opcode == "convolution":
            return _convolution(instruction, computation)
        if instruction.opcode == "custom-call":
            return _attention(instruction, computation)
        return 0.0

    def _traffic(self, instruction: Instruction, computation: Computation) -> float:
        """Bytes of the device's memory that are read and written."""
        if instruction.opcode == "fusion":
            (name,) = instruction.called("calls")
            return self._fusion_traffic(instruction, computation, self.program.computations[name])
        written = sum(array.bytes for array in instruction.results if not array.on_chip)
        if instruction.opcode in ("dynamic-slice", "slice", "gather", "broadcast"):
            return 2 * written if instruction.opcode != "broadcast" else written
        if instruction.opcode == "dynamic-update-slice":
            return 2 * _size(instruction.operands[1], computation)
        return written + sum(_size(operand, computation) for operand in instruction.operands)

    def _fusion_traffic(self, fusion: Instruction, computation: Computation, inner: Computation) -> float:
        """Operands and results; of an operand that is only sliced, the slices, of one updated in place, the update."""
        total = 0.0
        parameters = [i for i in inner.instructions if i.opcode == "parameter"]
        parameters.sort(key=lambda i: int(re.findall(r"^\d+", i.attributes)[0]))
        in_place = False
        for operand, parameter in zip(fusion.operands, parameters):
            whole = _size(operand, computation)
            parts = _parts(parameter.name, inner)
            if parts is None or not whole:
                total += whole
                continue
            in_place |= parts[1]
            total += min(whole, parts[0])
        written = float(sum(array.bytes for array in fusion.results if not array.on_chip))
        if in_place:
            updates = [i for i in inner.instructions if i.opcode == "dynamic-update-slice"]
            written = min(written, sum(_logical(i.operands[1], inner) for i in updates))
        return total + written


def _parts(name: str, inner: Computation) -> tuple[float, bool] | None:
    """Bytes taken from a fusion's operand that is only sliced or updated in place, and whether it is; else None."""
    total, in_place = 0.0, False
    for user in inner.users.get(name, []):
        if (
            user.opcode in ("bitcast", "reshape", "copy")
            and user.results[0].elements == inner.by_name[name].results[0].elements
        ):
            more = _parts(user.name, inner)
            if more is None:
                return None
            total, in_place = total + more[0], in_place | more[1]
        elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            total += sum(array.bytes for array in user.results)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            in_place = True
        else:
            return None
    return total, in_place


def _size(name: str, computation: Computation) -> float:
    return sum(array.bytes for array in computation.by_name[name].results if not array.on_chip)


def _logical(name: str, computation: Computation) -> float:
    return sum(array.bytes for array in computation.by_name[name].results)


def _dims(attributes: str, key: str) -> list[int]:
    match = re.search(rf"\b{key}=\{{([\d,]*)\}}", attributes)
    return [int(dim) for dim in match[1].split(",") if dim] if match else []


def _dot(instruction: Instruction, computation: Computation) -> float:
    left = computation.by_name[instruction.operands[0]].results[0].dims
    contracted = math.prod(left[dim] for dim in _dims(instruction.attributes, "lhs_contracting_dims"))
    return 2.0 * instruction.results[0].elements * contracted


def _ragged(fusion: Instruction, computation: Computation, experts: int) -> float:
    """Of TPU's ragged product, whose text says every row times every group's matrix, masked, which is not what runs.

    Its arrays are rows [M, K] and [M, N] and the groups' matrices [G, K, N], one of the three being the result.
    """
    arrays = [array for name in fusion.operands for array in computation.by_name[name].results] + [*fusion.results]
    arrays = [array for array in arrays if array.dtype in ("bf16", "f16", "f32")]
    groups, *matrix = next(array.dims for array in arrays if len(array.dims) == 3)
    rows = max(array.dims[0] for array in arrays if len(array.dims) == 2)
    return 2.0 * rows * math.prod(matrix) * (groups / experts if experts else 1.0)


def _convolution(instruction: Instruction, computation: Computation) -> float:
    """Two per multiply-add that meets real input: XLA writes batched products as convolutions, mostly of padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    left, right = (computation.by_name[name].results[0].dims for name in instruction.operands[:2])
    out = instruction.results[0].dims
    window = _window(instruction.attributes, sum(label.isdigit() for label in labels[1]))
    groups = re.search(r"batch_group_count=(\d+)", instruction.attributes)
    features = right[labels[2].index("i")]
    total = 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")] * features
    for axis in range(len(window)):
        sizes = (left[labels[1].index(str(axis))], right[labels[2].index(str(axis))], out[labels[3].index(str(axis))])
        total *= _meetings(*sizes, *window[axis])
    return total / int(groups[1]) if groups else total


def _window(attributes: str, axes: int) -> list[tuple[int, int, int, int]]:
    """(stride, padding before, dilation of the input, of the kernel) of each spatial axis."""
    match = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in match[1].split()) if match else {}

    def values(key: str, default: str) -> list[str]:
        return fields[key].split("x") if key in fields else [default] * axes

    pads = [int(pad.split("_")[0]) for pad in values("pad", "0_0")]
    numbers = [[int(value) for value in values(key, "1")] for key in ("stride", "lhs_dilate", "rhs_dilate")]
    return list(zip(numbers[0], pads, numbers[1], numbers[2]))


def _meetings(size: int, kernel: int, out: int, stride: int, pad: int, dilation: int, kernel_dilation: int) -> int:
    """Pairs of an output and a kernel position that meet an input element rather than padding or a hole."""
    span = (size - 1) * dilation + 1
    count = 0
    for tap in range(kernel):
        offset = tap * kernel_dilation - pad
        # Outputs o with 0 <= o * stride + offset < span and (o * stride + offset) divisible by the dilation.
        first = max(0, math.ceil(-offset / stride))
        last = min(out - 1, (span - 1 - offset) // stride)
        if dilation == 1:
            count += max(0, last - first + 1)
        else:
            count += sum((o * stride + offset) % dilation == 0 for o in range(first, last + 1))
    return count


def _attention(instruction: Instruction, computation: Computation) -> float:
    """Of a splash kernel, known by its name, from the queries' shape [..., H, S, hd]; 0 of other custom calls."""
    match = re.search(r"splash_m[hq]a_(fwd|dq|dkv)", instruction.attributes + instruction.name)
    if match is None:
        return 0.0
    shapes = [
        array.dims
        for name in instruction.operands
        for array in computation.by_name[name].results
        if array.dtype in ("bf16", "f32") and len(array.dims) >= 3 and array.dims[-1] > 1
    ]
    if not shapes:
        return 0.0
    *outer, length, head_dim = max(shapes, key=math.prod)
    return SPLASH_PRODUCTS[match[1]] * math.prod(outer) * length * length * head_dim


def _collective(kind: str, instruction: Instruction, computation: Computation) -> Collective:
    members = _members(instruction.attributes)
    given = sum(_logical(name, computation) for name in instruction.operands)
    share = (members - 1) / members if members else 1.0
    of_kind: dict[str, Callable[[], tuple[float, float]]] = {
        "all-gather": lambda: (given * members, given * members * share),
        "all-reduce": lambda: (given, 2 * given * share),
        "reduce-scatter": lambda: (given, given * share),
        "all-to-all": lambda: (given, given * share),
        "collective-permute": lambda: (given, given),
    }
    size, sent = of_kind[kind]()
    return Collective(1, size, sent)


def _members(attributes: str) -> int:
    """How many devices take part in one group of a collective; 0 where the text does not say."""
    by_axis = re.search(r"replica_groups=(?:@?\w+)?\[([^\]]*)\] \{([^}]*)\}", attributes)  # mesh['a'=2,'b'=4] {'b'}
    if by_axis:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", by_axis[1]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", by_axis[2])  # 'b':(1)2 is two of b's devices
        return math.prod(int(part or sizes[name]) for name, part in axes)
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes)
    if iota:
        return int(iota[2])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return len(listed[1].split(",")) if listed else 0
