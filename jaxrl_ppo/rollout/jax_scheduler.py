"""Continuous batching for the JAX engine: which request runs in which slot, when batches grow and shrink."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxrl_ppo.models.cache import Sharing
from jaxrl_ppo.rollout.engine import Completion, Request
from jaxrl_ppo.rollout.jax_batch import Programs, Prompts, Shape, SlotBatch, SlotInputs
from jaxrl_ppo.rollout.jax_sampling import Draw
from jaxrl_ppo.rollout.jax_shapes import power_of_two, power_of_two_below, rung

LEAST_SLOTS = 8  # fewer take as long: the time goes into reading the weights
LEAST_COLUMNS, FIRST_COLUMNS = 16, 64
SPARE_MEMBERS = 8  # rows x members may exceed the slots so many times before their table is made anew

Sequence = tuple[int, ...]


@dataclasses.dataclass(eq=False, slots=True)
class Generation:
    """A request under way. `finished` receives its completion."""

    request: Request
    finished: Callable[[Completion], None]
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    prefix: Sequence = ()  # what was prefilled: the prompt, and the tokens before the last change of weights
    row: int = -1  # where the batch has the prefix

    @property
    def sequence(self) -> Sequence:
        """All tokens so far."""
        return (*self.request.prompt_ids, *self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return self.request.sampling.max_new_tokens - len(self.tokens)

    @property
    def truncates(self) -> bool:
        """Whether its distribution is cut by top-k or top-p."""
        sampling = self.request.sampling
        return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


class Scheduler:
    """Runs generations to their ends, a few tokens at each `step`. Not thread-safe."""

    def __init__(self, programs: Programs, stop_ids: Iterable[int], max_slots: int, max_prefill_tokens: int):
        self._programs = programs
        self._stop_ids = np.array([*stop_ids] or [-1], np.int32)
        self._max_slots, self._max_prefill_tokens = max_slots, max_prefill_tokens
        self._params: Any = None
        self._version = -1
        self._waiting: collections.deque[Generation] = collections.deque()
        self._slots: list[Generation | None] = []
        self._rows: list[Sequence | None] = []  # a prefix with many requests has several
        self._batch: SlotBatch | None = None

    @property
    def active(self) -> list[Generation]:
        """Generations that occupy a slot."""
        return [slot for slot in self._slots if slot is not None]

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting) or any(self._slots)

    def submit(self, generations: Iterable[Generation]) -> None:
        """Queue generations, first come first served."""
        self._waiting.extend(generations)

    def drop(self, generations: Iterable[Generation]) -> None:
        """Forget generations that nobody waits for any more."""
        gone = set(generations)
        self._waiting = collections.deque(g for g in self._waiting if g not in gone)
        self._slots = [None if slot in gone else slot for slot in self._slots]

    def set_weights(self, params: Any, version: int) -> None:
        """Sample from these weights from now on.

        What runs is prefilled again, with its tokens so far: each later token comes from the new weights alone.
        """
        self._waiting.extendleft(reversed(self.active))
        self._slots, self._rows, self._batch = [], [], None
        self._params, self._version = params, version

    def clear(self) -> None:
        """Forget all generations, their caches and the weights."""
        self._waiting.clear()
        self._slots, self._rows, self._batch = [], [], None
        self._params = None

    def step(self) -> None:
        """Admit what waits and fits, then a few tokens for all."""
        self._admit()
        self._fit()
        if self._batch is not None and self.active:
            self._decode(self._batch)

    def _admit(self) -> None:
        """Give waiting requests the free slots: their prompts are prefilled, once each, and first tokens drawn."""
        free = self._max_slots - len(self.active)
        admitted = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        if not admitted:
            return
        for generation in admitted:
            generation.prefix = generation.sequence
        if not self.active:
            self._slots, self._rows, self._batch = [], [], None
        self._forget_unused_rows()
        batch = self._make_room(admitted)
        places = [i for i, slot in enumerate(self._slots) if slot is None][: len(admitted)]
        batch.clear_slots(places)
        new_rows = self._assign_rows(admitted, batch.shape.members)
        for slot, generation in zip(places, admitted):
            self._slots[slot] = generation
        for group in self._prefill_groups(sorted(new_rows, key=lambda prefix: (len(prefix), prefix))):
            targets = [(source, row) for source, prefix in enumerate(group) for row in new_rows[prefix]]
            batch.put_prompts(self._prefill(group), *zip(*targets))
        self._first_tokens(batch, admitted)

    def _assign_rows(self, admitted: list[Generation], members: int) -> dict[Sequence, list[int]]:
        """Give each generation a row with its prefix and room for one more; returns the rows that are new."""
        room = self._room(members)
        new: dict[Sequence, list[int]] = {}
        for generation in admitted:
            rows = room.setdefault(generation.prefix, [])
            if not rows:
                row = self._rows.index(None)
                self._rows[row] = generation.prefix
                new.setdefault(generation.prefix, []).append(row)
                rows += [row] * members
            generation.row = rows.pop()
        return new

    def _room(self, members: int) -> dict[Sequence, list[int]]:
        """For each prefix, its rows, as often as further requests fit there."""
        taken = collections.Counter(g.row for g in self.active)
        room: dict[Sequence, list[int]] = {}
        for row, prefix in enumerate(self._rows):
            if prefix is not None:
                room.setdefault(prefix, []).extend([row] * (members - taken[row]))
        return room

    def _prefill_groups(self, prompts: list[Sequence]) -> Iterable[list[Sequence]]:
        """Prompts, shortest first, cut where a padded batch would exceed the token limit."""
        group: list[Sequence] = []
        for prompt in prompts:
            if group and power_of_two(len(group) + 1) * rung(len(prompt)) > self._max_prefill_tokens:
                yield group
                group = []
            group.append(prompt)
        if group:
            yield group

    def _prefill(self, prompts: list[Sequence]) -> Prompts:
        tokens = np.zeros((power_of_two(len(prompts)), rung(max(map(len, prompts)))), np.int32)
        lengths = np.ones(len(tokens), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        return self._programs.prefill(self._params, tokens, lengths)

    def _first_tokens(self, batch: SlotBatch, generations: list[Generation]) -> None:
        size = power_of_two(len(generations), LEAST_SLOTS)
        rows = _column(generations, size, np.int32, lambda g: g.row)
        drawn = _column(generations, size, np.int32, lambda g: len(g.tokens))
        truncate = any(g.truncates for g in generations)
        tokens, log_probs = batch.first_tokens(self._params, rows, drawn, _draw(generations, size), truncate)
        for generation, token, log_prob in zip(generations, tokens, log_probs):
            self._append(generation, int(token), float(log_prob))

    def _append(self, generation: Generation, token: int, log_prob: float) -> bool:
        """Take one token; true when it was the last."""
        generation.tokens.append(token)
        generation.log_probs.append(log_prob)
        generation.versions.append(self._version)
        stopped = token in self._stop_ids and not generation.request.sampling.ignore_eos
        if not stopped and generation.remaining:
            return False
        self._slots[self._slots.index(generation)] = None
        generation.finished(
            Completion(
                generation.request.id,
                np.array(generation.tokens, np.int32),
                np.array(generation.log_probs, np.float32),
                np.array(generation.versions, np.int32),
                "stop" if stopped else "length",
            )
        )
        return True

    def _make_room(self, admitted: list[Generation]) -> SlotBatch:
        """A batch with slots and rows for `admitted`; running requests keep theirs."""
        active = self.active
        old = self._batch
        slots = min(power_of_two(len(active) + len(admitted), LEAST_SLOTS), self._max_slots)
        columns = min(self._columns_needed([*active, *admitted]), FIRST_COLUMNS)
        prompt_columns = rung(max(len(g.prefix) for g in admitted))
        members = old.shape.members if old else _members(admitted)
        room = {prefix: len(rows) for prefix, rows in self._room(members).items()}
        wanted = collections.Counter(g.prefix for g in admitted)
        new = sum(-(-max(count - room.get(prefix, 0), 0) // members) for prefix, count in wanted.items())
        rows = power_of_two(new + sum(row is not None for row in self._rows))
        shape = Shape(slots, columns, rows, prompt_columns, members)
        if old is None:
            self._batch = SlotBatch(self._programs, shape)
            self._slots, self._rows = [None] * shape.slots, [None] * shape.rows
            return self._batch
        shape = Shape(*(max(a, b) for a, b in zip(old.shape, shape)))
        return old if shape == old.shape else self._move(old, shape)

    @staticmethod
    def _columns_needed(generations: list[Generation]) -> int:
        return power_of_two(max(len(g.sequence) + g.remaining - len(g.prefix) for g in generations), LEAST_COLUMNS)

    def _move(self, old: SlotBatch, shape: Shape) -> SlotBatch:
        """Go on in a batch of another shape. Rows move only when there become fewer, to the used ones."""
        slots = [i for i, slot in enumerate(self._slots) if slot is not None]
        if shape.rows < old.shape.rows:
            self._forget_unused_rows()
            rows = [i for i, row in enumerate(self._rows) if row is not None]
            for generation in self.active:
                generation.row = rows.index(generation.row)
        else:
            rows = list(range(old.shape.rows))
        self._batch = old.reshaped(shape, slots, rows)
        moved, kept = [self._slots[i] for i in slots], [self._rows[i] for i in rows]
        self._slots = moved + [None] * (shape.slots - len(moved))
        self._rows = kept + [None] * (shape.rows - len(kept))
        return self._batch

    def _forget_unused_rows(self) -> None:
        used = {g.row for g in self.active}
        self._rows = [prefix if row in used else None for row, prefix in enumerate(self._rows)]

    def _fit(self) -> None:
        """Shrink the batch to what still runs; grow the ring where a request would outgrow it."""
        batch, active = self._batch, self.active
        if batch is None or not active:
            return
        shape = batch.shape
        if len(active) <= shape.slots // 2 and shape.slots > LEAST_SLOTS:
            shape = shape._replace(slots=power_of_two(len(active), LEAST_SLOTS))
            if shape.rows * shape.members > SPARE_MEMBERS * shape.slots:
                taken = collections.Counter(g.row for g in active)
                members = power_of_two(max(taken.values()))
                shape = shape._replace(rows=power_of_two(len(taken)), members=members)
        written = max(len(g.sequence) - len(g.prefix) for g in active)
        if written - 1 + min(self._programs.steps, max(g.remaining for g in active)) > shape.columns:
            shape = shape._replace(columns=min(2 * shape.columns, self._columns_needed(active)))
        if shape != batch.shape:
            self._move(batch, shape)

    def _decode(self, batch: SlotBatch) -> None:
        size = batch.shape.slots
        inputs = SlotInputs(
            tokens=_column(self._slots, size, np.int32, lambda g: g.tokens[-1]),
            positions=_column(self._slots, size, np.int32, lambda g: len(g.sequence) - 1),
            drawn=_column(self._slots, size, np.int32, lambda g: len(g.tokens)),
            remaining=_column(self._slots, size, np.int32, lambda g: g.remaining),
            stops=_column(self._slots, size, np.bool_, lambda g: not g.request.sampling.ignore_eos),
            draw=_draw(self._slots, size),
        )
        truncate = any(g.truncates for g in self.active)
        decoded = batch.decode(self._params, inputs, self._sharing(batch.shape), self._stop_ids, truncate)
        for slot, generation in enumerate(list(self._slots)):
            if generation is None:
                continue
            for step in range(decoded.steps):
                if self._append(generation, int(decoded.tokens[step, slot]), float(decoded.log_probs[step, slot])):
                    break

    def _sharing(self, shape: Shape) -> Sharing:
        members = np.zeros((shape.rows, shape.members), np.int32)
        home = np.zeros(shape.slots, np.int32)
        taken = [0] * shape.rows
        for slot, generation in enumerate(self._slots):
            if generation is not None:
                row = generation.row
                members[row, taken[row]] = slot
                home[slot] = row * shape.members + taken[row]
                taken[row] += 1
        lengths = np.array([len(prefix) if prefix else 1 for prefix in self._rows], np.int32)
        return Sharing(members, home, lengths)


def _members(generations: list[Generation]) -> int:
    """How many requests share a row: as many as have a prompt in common on average, so that rows x members is small."""
    return power_of_two_below(len(generations) // len({g.prefix for g in generations}))


def _column(
    generations: Iterable[Generation | None], size: int, dtype: Any, value: Callable[[Generation], Any]
) -> np.ndarray:
    column = np.zeros(size, dtype)
    for row, generation in enumerate(generations):
        if generation is not None:
            column[row] = value(generation)
    return column


def _draw(generations: list[Any], size: int) -> Draw:
    seeds = np.zeros((size, 2), np.uint32)
    for row, generation in enumerate(generations):
        if generation is not None:
            seeds[row] = divmod(generation.request.seed % (1 << 64), 1 << 32)
    return Draw(
        seeds,
        _column(generations, size, np.float32, lambda g: g.request.sampling.temperature),
        _column(generations, size, np.int32, lambda g: max(g.request.sampling.top_k, 0)),
        np.where(
            [g is None for g in generations] + [True] * (size - len(generations)),
            np.float32(1.0),
            _column(generations, size, np.float32, lambda g: g.request.sampling.top_p),
        ),
    )
