"""Asynchronous PPO's decisions: how many prompts may start, which finished ones make a batch. No tasks, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jaxrl_ppo.schema.records import Prompt, Sample


@dataclasses.dataclass(eq=False, slots=True)
class Group:
    """A prompt that has been started, and those of its samples that are there, scored.

    `started_after` is the step whose weights the rollouts had then: none of its tokens is older.
    """

    prompt: Prompt
    wanted: int
    started_after: int
    samples: list[Sample] = dataclasses.field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether all samples are there."""
        return len(self.samples) == self.wanted


class Backlog:
    """Prompts between their start and their training, oldest first.

    A group that started with the weights of step w may be trained in step w + 1 + `max_staleness` at the latest: that
    step's gradient is taken at the weights of the step before. Groups are started only while the steps up to there
    have room for all, so each can be trained in time however long it takes: the batch that needs it waits for it, and
    younger ones that finish first go ahead only where that delays nobody past the limit.
    """

    def __init__(self, *, batch_size: int, capacity: int, max_staleness: int, next_step: int, total_steps: int):
        """`capacity` is how many prompts may be under way or waiting at a time, at least `batch_size`."""
        self.batch_size, self.capacity, self.max_staleness = batch_size, capacity, max_staleness
        self.next_step, self.total_steps = next_step, total_steps
        self.groups: list[Group] = []

    def room(self, weights_after: int) -> int:
        """How many prompts may start now with the weights of step `weights_after`."""
        last = min(weights_after + 1 + self.max_staleness, self.total_steps)
        trainable = self.batch_size * (last + 1 - self.next_step)
        return max(min(self.capacity, trainable) - len(self.groups), 0)

    def add(self, groups: Iterable[Group]) -> None:
        """Groups have been started."""
        self.groups += groups

    def take(self) -> list[Group] | None:
        """The next step's groups, in the order of their prompts; None while too few have finished."""
        batch = [group for group in self.groups if group.finished][: self.batch_size]
        if len(batch) < self.batch_size:
            return None
        rest = [group for group in self.groups if group not in batch]
        if not all(self.in_time(group, self.batch_size + i) for i, group in enumerate(rest)):
            return None
        self.groups = rest
        self.next_step += 1
        return sorted(batch, key=lambda group: group.prompt.ordinal)

    def in_time(self, group: Group, position: int) -> bool:
        """Whether `group` is within the limit when it is trained as number `position`, from 0, from now on."""
        return self.next_step + position // self.batch_size <= group.started_after + 1 + self.max_staleness


def resumable(groups: Sequence[Group]) -> list[Group]:
    """What a checkpoint keeps of `groups`: those that are finished, then the others, to be generated again."""
    finished = [group for group in groups if group.finished]
    return finished + [dataclasses.replace(group, samples=[]) for group in groups if not group.finished]
