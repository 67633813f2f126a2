"""From a batch of samples to fixed-shape rows: which token lies where, and which hidden state predicts which token."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxrl_ppo.schema.records import Batch

STEP_COST = 64  # what one more micro-step costs beside its tokens (gradient accumulation), in tokens


class PackingError(ValueError):
    """A batch that cannot be packed under its limits."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackingLimits:
    """How micro-steps may look.

    `groups` is the number of data-parallel pieces that rows are dealt to. One piece of one micro-step holds at most
    `tokens` tokens (padding included) and `sequences` samples (None: no limit); `tokens_key` is the configuration key
    of the former, for messages. `share_prefix` computes a prompt once for all its responses in a row.
    `attention_cost` is what a token's attention costs per token of row length, relative to everything else the token
    costs: 0 for kernels that skip other segments, where long rows are free. Row lengths and targets a piece are
    multiples of `multiple`.
    """

    groups: int
    tokens: int | None
    tokens_key: str
    sequences: int | None = None
    share_prefix: bool = True
    attention_cost: float = 0.0
    multiple: int = 16


@dataclasses.dataclass(frozen=True, slots=True)
class MicroStep:
    """The rows of one forward and backward pass: G data-parallel pieces of K rows of S tokens, T targets a piece.

    A target is a token to be predicted: its hidden state is at `source` in its piece's K * S tokens, its id is
    `target`. `sequence` numbers the samples within a piece (for sums over a sample). `sample` and `offset` say where
    the token lies in the batch's [B, T'] columns; unused slots have sample -1, and mask 0 in every column.
    """

    tokens: np.ndarray  # int32 [G * K, S]
    positions: np.ndarray  # int32 [G * K, S]
    segment_ids: np.ndarray  # int32 [G * K, S], 0 = padding
    branch_ids: np.ndarray | None  # int32 [G * K, S], 0 = prompt, 1.. = its responses; None without sharing
    source: np.ndarray  # int32 [G, T]
    target: np.ndarray  # int32 [G, T]
    sequence: np.ndarray  # int32 [G, T]
    sample: np.ndarray  # int32 [G, T]
    offset: np.ndarray  # int32 [G, T]

    def take(self, column: np.ndarray) -> np.ndarray:
        """A [B, T'] column at this step's targets, float32 [G, T]; 0 in unused slots, whatever the column holds."""
        return np.where(self.sample >= 0, column[self.sample, self.offset], 0).astype(np.float32)

    def put(self, values: np.ndarray, column: np.ndarray) -> None:
        """Write [G, T] values of this step's targets into their places in a [B, T'] column."""
        used = self.sample >= 0
        column[self.sample[used], self.offset[used]] = values[used]


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """Micro-steps of one shape, and how well they are filled: `used` of `slots` row tokens are not padding."""

    steps: list[MicroStep]
    used: int
    slots: int

    @property
    def padding_waste(self) -> float:
        """Share of the row tokens that are padding; 0 when there is nothing to compute."""
        return 1 - self.used / self.slots if self.slots else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Segment:
    """A prompt and those of its samples that share its copy. `inputs[i]` response tokens of sample i are fed."""

    group: int
    prompt_length: int
    samples: tuple[int, ...]
    inputs: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.prompt_length + sum(self.inputs)


def ladder(size: int, multiple: int = 1, octave: int = 4) -> int:
    """The smallest allowed size >= `size`: multiples of `multiple`, ever coarser, `octave` (a power of 2) to an octave.

    A batch then pads by a few per cent and the shapes of a run, each a compiled program, stay few.
    """
    units = max(1, math.ceil(size / multiple))
    step = 2 ** max(0, (units - 1).bit_length() - octave.bit_length())
    return math.ceil(units / step) * step * multiple


def pack(batch: Batch, samples: Iterable[int], limits: PackingLimits) -> Packing:
    """Pack the given samples of `batch`; those with an all-zero mask have nothing to predict and are left out.

    A response's last target is not fed (nothing follows it), and what lies behind it is neither. Rows are filled
    first-fit-decreasing; their length is the one that costs least under `limits`; they are dealt to micro-steps and
    data-parallel pieces so that targets are balanced. A pure function: every process packs the same batch alike.

    Raises PackingError when one sample alone exceeds the token limit, naming its prompt and the key.
    """
    segments = list(_prompt_groups(batch, samples))
    if not segments:
        return Packing([], 0, 0)
    _check_longest(batch, segments, limits)
    length, rows = _choose_rows(segments, limits)
    targets = np.sum(batch.response_mask > 0, axis=1)
    pieces, per_piece = _deal(rows, targets, length, limits)
    fullest = max(sum(int(targets[list(s.samples)].sum()) for row in piece for s in row) for piece in pieces)
    slots = ladder(fullest, limits.multiple, octave=2)
    builders = [_Builder(batch, per_piece, length, slots, limits.share_prefix) for _ in pieces]
    for builder, piece in zip(builders, pieces):
        for index, row in enumerate(piece):
            builder.fill(index, row)
    groups = limits.groups
    steps = [_micro_step(builders[i : i + groups]) for i in range(0, len(builders), groups)]
    used = sum(segment.size for row in rows for segment in row)
    return Packing(steps, used, len(pieces) * per_piece * length)


def _prompt_groups(batch: Batch, samples: Iterable[int]) -> Iterator[_Segment]:
    by_group: dict[int, list[int]] = {}
    for sample in samples:
        if batch.response_mask[sample].any():
            by_group.setdefault(int(batch.group[sample]), []).append(int(sample))
    for group, members in by_group.items():
        last = [int(np.flatnonzero(batch.response_mask[sample])[-1]) for sample in members]
        yield _Segment(group, len(batch.prompts[group].token_ids), tuple(members), tuple(last))


def _check_longest(batch: Batch, segments: list[_Segment], limits: PackingLimits) -> None:
    if limits.tokens is None:
        return
    for segment in segments:
        longest = max(segment.inputs)
        if segment.prompt_length + longest > limits.tokens:
            raise PackingError(
                f"prompt {batch.prompts[segment.group].ordinal}: {segment.prompt_length} prompt tokens and a response "
                f"of {longest + 1} do not fit into {limits.tokens_key}={limits.tokens}; raise it, or lower "
                "data.max_prompt_length or data.max_response_length"
            )


def _choose_rows(groups: list[_Segment], limits: PackingLimits) -> tuple[int, list[list[_Segment]]]:
    """The row length that costs least, and the rows."""
    shortest = max(segment.prompt_length + max(segment.inputs) for segment in groups)
    longest = sum(segment.size for segment in groups)
    ceiling = limits.tokens or ladder(longest, limits.multiple)
    best: tuple[float, int, list[list[_Segment]]] | None = None
    length = min(ladder(shortest, limits.multiple), ceiling)
    while True:
        rows = _fill_rows(groups, length, limits)
        steps, per_piece = _grid(len(rows), length, limits)
        tokens = steps * per_piece * length
        cost = tokens * (1 + limits.attention_cost * length) + steps * STEP_COST
        if best is None or cost < best[0]:
            best = cost, length, rows
        if length >= min(ceiling, longest):
            return best[1], best[2]
        length = min(ladder(length + 1, limits.multiple), ceiling)


def _fill_rows(groups: list[_Segment], length: int, limits: PackingLimits) -> list[list[_Segment]]:
    segments = [piece for group in groups for piece in _split(group, length, limits)]
    rows = _first_fit(
        [segment.size for segment in segments], [len(segment.samples) for segment in segments], length, limits.sequences
    )
    return [[segments[i] for i in row] for row in rows]


def _split(group: _Segment, length: int, limits: PackingLimits) -> list[_Segment]:
    """A prompt's samples as segments that fit a row, each with its own copy of the prompt."""
    if limits.share_prefix:
        bins = _first_fit(list(group.inputs), [1] * len(group.inputs), length - group.prompt_length, limits.sequences)
    else:
        bins = [[i] for i in range(len(group.samples))]
    return [
        _Segment(
            group.group,
            group.prompt_length,
            tuple(group.samples[i] for i in members),
            tuple(group.inputs[i] for i in members),
        )
        for members in bins
    ]


def _first_fit(sizes: list[int], counts: list[int], room: int, seats: int | None) -> list[list[int]]:
    """First-fit-decreasing of items into bins of `room` size and at most `seats` counted samples; item indices."""
    free = np.full(len(sizes), room)
    free_seats = np.full(len(sizes), len(sizes) + sum(counts) if seats is None else seats)
    bins: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        opened = len(bins) + 1  # one bin past the last is always empty
        chosen = int(np.argmax((free[:opened] >= sizes[item]) & (free_seats[:opened] >= counts[item])))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(item)
        free[chosen] -= sizes[item]
        free_seats[chosen] -= counts[item]
    return bins


def _grid(rows: int, length: int, limits: PackingLimits) -> tuple[int, int]:
    """Micro-steps and rows a piece that hold `rows` rows with the fewest tokens."""
    most = limits.sequences if limits.tokens is None else limits.tokens // length
    most = rows if most is None else max(1, most)
    fewest_steps = math.ceil(rows / (limits.groups * most))
    options = []
    for steps in range(fewest_steps, fewest_steps + 4):
        per_piece = math.ceil(rows / (limits.groups * steps))
        per_piece = min(ladder(per_piece), max(most, per_piece))
        options.append((steps * (per_piece * length + STEP_COST), steps, per_piece))
    return min(options)[1:]


def _deal(
    rows: list[list[_Segment]], targets: np.ndarray, length: int, limits: PackingLimits
) -> tuple[list[list[list[_Segment]]], int]:
    """Deal rows to pieces, the fullest first, each to the piece with the fewest targets: pieces of all micro-steps.

    Returns the pieces (micro-step major) and the number of rows a piece has room for.
    """
    steps, per_piece = _grid(len(rows), length, limits)
    weights = [sum(int(targets[list(segment.samples)].sum()) for segment in row) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: -weights[i])
    while True:
        pieces: list[list[list[_Segment]]] = [[] for _ in range(steps * limits.groups)]
        seats = [math.inf if limits.sequences is None else limits.sequences] * len(pieces)
        heap = [(0, i) for i in range(len(pieces))]
        for index in order:
            wanted = sum(len(segment.samples) for segment in rows[index])
            passed = []
            while heap and seats[heap[0][1]] < wanted:
                passed.append(heapq.heappop(heap))
            if not heap:
                break
            load, piece = heapq.heappop(heap)
            pieces[piece].append(rows[index])
            seats[piece] -= wanted
            for entry in passed:
                heapq.heappush(heap, entry)
            if len(pieces[piece]) < per_piece:
                heapq.heappush(heap, (load + weights[index], piece))
        else:
            return pieces, per_piece
        steps += 1  # the limit on samples left some rows without a place


class _Builder:
    """One data-parallel piece of one micro-step while it is being filled."""

    def __init__(self, batch: Batch, rows: int, length: int, slots: int, share_prefix: bool):
        self.batch = batch
        self.share_prefix = share_prefix
        self.tokens, self.positions, self.segments, self.branches = (
            np.zeros((rows, length), np.int32) for _ in range(4)
        )
        self.source, self.target, self.sequence, self.offset = (np.zeros(slots, np.int32) for _ in range(4))
        self.sample = np.full(slots, -1, np.int32)
        self.filled = 0
        self.sequences = 0

    def fill(self, row: int, segments: list[_Segment]) -> None:
        length = self.tokens.shape[1]
        column = 0
        for number, segment in enumerate(segments, start=1):
            start, size = column, segment.prompt_length
            self.segments[row, start : start + segment.size] = number
            self.tokens[row, start : start + size] = self.batch.prompts[segment.group].token_ids
            self.positions[row, start : start + size] = np.arange(size)
            column += size
            for branch, (sample, inputs) in enumerate(zip(segment.samples, segment.inputs), start=1):
                here = slice(column, column + inputs)
                self.tokens[row, here] = self.batch.response_ids[sample, :inputs]
                self.positions[row, here] = np.arange(size, size + inputs)
                self.branches[row, here] = branch
                # Response token 0 follows the prompt's last token, token t > 0 the response's token t - 1.
                before = row * length + np.concatenate([[start + size - 1], np.arange(column, column + inputs)])
                self._add_targets(sample, before)
                column += inputs

    def _add_targets(self, sample: int, before: np.ndarray) -> None:
        offsets = np.flatnonzero(self.batch.response_mask[sample])
        here = slice(self.filled, self.filled + len(offsets))
        self.source[here] = before[offsets]
        self.target[here] = self.batch.response_ids[sample, offsets]
        self.sequence[here] = self.sequences
        self.sample[here] = sample
        self.offset[here] = offsets
        self.filled += len(offsets)
        self.sequences += 1


def _micro_step(builders: list[_Builder]) -> MicroStep:
    def rows(name: str) -> np.ndarray:
        return np.concatenate([getattr(builder, name) for builder in builders])

    def slots(name: str) -> np.ndarray:
        return np.stack([getattr(builder, name) for builder in builders])

    return MicroStep(
        tokens=rows("tokens"),
        positions=rows("positions"),
        segment_ids=rows("segments"),
        branch_ids=rows("branches") if builders[0].share_prefix else None,
        source=slots("source"),
        target=slots("target"),
        sequence=slots("sequence"),
        sample=slots("sample"),
        offset=slots("offset"),
    )
