"""DAPO's dynamic sampling: a batch of prompts whose samples differ; others are replaced while the rest still run."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from jaxrl_ppo.algorithms.groups import groups_with_signal
from jaxrl_ppo.pipeline.batching import RewardPartError
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.records import Prompt, Sample

log = logging.getLogger(__name__)

Scored = Callable[[Sample], None]
Respond = Callable[[Sequence[Prompt], Scored], Awaitable[object]]

OF_THE_SCORE = ("score", "seq_reward", "seq_final_reward")  # verl's names for the reward itself
BATCHES_TO_A_WARNING = 10


class TooFewGroupsError(RuntimeError):
    """So many prompts carry no signal that a batch was not full within algorithm.filter_groups.max_num_gen_batches."""


@dataclasses.dataclass(slots=True)
class Filled:
    """What came of filling a batch: its prompts and their samples, and how many prompts that took."""

    prompts: list[Prompt]
    samples: list[Sample]
    metrics: dict[str, float]


class DynamicSampling:
    """Fills one step's batch (Yu et al. 2025, arXiv 2503.14476).

    A prompt that carries no signal is replaced as soon as its last sample is scored. Which prompts make the batch, and
    how many are drawn, depends on their samples alone, not on the order in which those finish: the prompts drawn first
    of those with a signal. So a resumed run fills the same batches.
    """

    def __init__(self, config: Config, samples_per_prompt: int):
        """`samples_per_prompt` counts those that a group is complete with, ReMax's greedy one included."""
        settings = config.algorithm.filter_groups
        self.metric = settings.metric or "score"
        self.size = config.data.train_batch_size
        self.gen_size = config.data.gen_batch_size or self.size
        self.most = settings.max_num_gen_batches * self.gen_size or math.inf
        self.samples_per_prompt, self.compared = samples_per_prompt, config.actor_rollout_ref.rollout.n
        self._drawn: list[Prompt] = []
        self._samples: dict[int, list[Sample]] = {}
        self._dropped: set[int] = set()

    async def fill(self, prompts: Sequence[Prompt], take: Callable[[int], list[Prompt]], respond: Respond) -> Filled:
        """Begin with `prompts`; `take(n)` draws more. `respond` has prompts answered, and calls back for each sample.

        Raises TooFewGroupsError, and RewardPartError when the reward has no number of the metric's name.
        """
        async with asyncio.TaskGroup() as running:

            def start(more: Sequence[Prompt]) -> None:
                self._drawn += more
                self._samples |= {prompt.ordinal: [] for prompt in more}
                running.create_task(self._respond(more, respond, replace))

            def replace() -> None:
                while (missing := self.size - len(self._drawn) + len(self._dropped)) > 0:
                    self._check_room(missing)
                    start(take(missing))

            start(prompts)
            replace()
        kept = [prompt for prompt in self._drawn if prompt.ordinal not in self._dropped][: self.size]
        metrics = {
            "training/num_gen_batches": math.ceil(len(self._drawn) / self.gen_size),
            "training/generated_prompts": float(len(self._drawn)),
            "training/dropped_prompts": float(len(self._dropped)),
        }
        return Filled(kept, [sample for prompt in kept for sample in self._samples[prompt.ordinal]], metrics)

    async def _respond(self, prompts: Sequence[Prompt], respond: Respond, replace: Callable[[], None]) -> None:
        def scored(sample: Sample) -> None:
            group = self._samples[sample.ordinal]
            group.append(sample)
            if len(group) == self.samples_per_prompt and not self._has_signal(group):
                self._dropped.add(sample.ordinal)
                replace()

        await respond(prompts, scored)

    def _has_signal(self, group: Sequence[Sample]) -> bool:
        values = np.array([self._value(sample) for sample in group if sample.index < self.compared])
        return bool(groups_with_signal(values, np.zeros(len(values), np.int32))[0])

    def _value(self, sample: Sample) -> float:
        if self.metric in OF_THE_SCORE:
            return sample.reward or 0.0
        if not sample.reward_parts and not sample.reward:  # its reward failed
            return 0.0
        if self.metric not in sample.reward_parts:
            raise RewardPartError(
                f"algorithm.filter_groups.metric={self.metric}: the reward of prompt {sample.ordinal}, sample "
                f"{sample.index}, has no such number; it has {', '.join(sorted(sample.reward_parts)) or 'score'}"
            )
        return sample.reward_parts[self.metric]

    def _check_room(self, missing: int) -> None:
        drawn, dropped = len(self._drawn), len(self._dropped)
        said = f"{dropped} of {drawn} prompts had samples that all score the same ({self.metric})"
        if drawn + missing > self.most:
            raise TooFewGroupsError(
                f"{said}, and algorithm.filter_groups.max_num_gen_batches x data.gen_batch_size = {self.most} prompts "
                "do not fill the batch: the prompts are too easy or too hard for this policy, or the limit is too low"
            )
        before, after = (count // (BATCHES_TO_A_WARNING * self.gen_size) for count in (drawn, drawn + missing))
        if after > before:
            log.warning("%s; going on to fill the batch of %d", said, self.size)
