"""Asynchronous PPO's rollout side: keeps prompts under way, gives the rollouts new weights, hands out batches."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence

import numpy as np

from jaxrl_ppo.pipeline.backlog import Backlog, Group, resumable
from jaxrl_ppo.pipeline.checkpoints import CheckpointError
from jaxrl_ppo.pipeline.generation import Generated
from jaxrl_ppo.pipeline.step import Run
from jaxrl_ppo.schema.config import RolloutConfig
from jaxrl_ppo.schema.records import Prompt, Sample
from jaxrl_ppo.weights.manifest import WeightManifest


class RolloutQueue:
    """What runs beside the trainer. It acts when a sample is scored, a batch is taken, weights are offered or loaded.

    Prompts that may start at one moment start as one call of the rollouts, as the other modes start a batch. With
    `async_training.partial_rollout` new weights are loaded under running requests, else once nothing runs. With a
    staleness limit of 1 and no over-sampling the latter is one-step-off, with a limit of 0 either is synchronous.
    """

    def __init__(self, run: Run):
        settings, rollout = run.config.async_training, run.config.actor_rollout_ref.rollout
        self.run = run
        self.partial = settings.partial_rollout
        size = run.config.data.train_batch_size
        self._backlog = Backlog(
            batch_size=size,
            capacity=_capacity(size, rollout),
            max_staleness=settings.max_staleness,
            next_step=run.step + 1,
            total_steps=run.total_steps,
        )
        self._offered: WeightManifest | None = None
        self._loading: asyncio.Task[None] | None = None
        self._held = False
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._reports: dict[str, float] = {}
        self._take_up(run.restored_groups())
        self._advance()

    async def take(self, step: int) -> Generated:
        """The batch of `step`, as soon as enough prompts have finished. Raises what went wrong with any."""
        with self.run.waiting_for_rollouts(step):
            while (groups := self._backlog.take()) is None:
                await self._change()
        self._advance()
        samples = [sample for group in groups for sample in group.samples]
        generated = self.run.generation.assemble(step, [group.prompt for group in groups], samples)
        generated.metrics = self._reports | generated.metrics | self._metrics(generated.samples)
        self._reports = {}
        return generated

    def offer_weights(self) -> None:
        """Let the rollouts have the weights that were staged last, as soon as that may be."""
        self._offered = self.run.staged
        self._advance()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Start nothing meanwhile; unless weights may change under them, running requests come to their end first."""
        self._held = True
        while self._loading or not (self.partial or all(group.finished for group in self._backlog.groups)):
            await self._change()
        self._reports |= self.run.rewards.batch_report("the batch under way")  # a validation makes one of its own
        yield
        self._held = False
        self._advance()

    def outstanding(self) -> asyncio.Task[list[Group]]:
        """What a checkpoint taken now must hold of the prompts that have been started and not trained.

        Those that run are waited for where they end with the weights that they began with; else they are to be
        generated again.
        """
        groups = list(self._backlog.groups)
        if self.partial:
            groups = [dataclasses.replace(group, samples=list(group.samples)) for group in groups]

        async def settled() -> list[Group]:
            while not (self.partial or all(group.finished for group in groups)):
                await self._change()
            return resumable(groups)

        return asyncio.create_task(settled(), name="outstanding prompts")

    def _take_up(self, groups: Sequence[Group]) -> None:
        """Go on with what a checkpoint held; what is unfinished, or would be too stale, is generated again."""
        backlog = self._backlog
        if len(groups) > (most := backlog.batch_size * (backlog.max_staleness + 1)):
            raise CheckpointError(
                f"the checkpoint holds {len(groups)} prompts that were already started, more than the {most} that "
                f"async_training.max_staleness={backlog.max_staleness} allows: resume with the limit it was made with"
            )
        kept = [group for i, group in enumerate(groups) if group.finished and backlog.in_time(group, i)]
        again = [self._group(group.prompt) for group in groups if group not in kept]
        backlog.add(kept + again)
        if again:
            self._start(again)

    def _advance(self) -> None:
        """Do what can be done now: load newer weights, or else start prompts."""
        if self._held or self._loading:
            return
        idle = all(group.finished for group in self._backlog.groups)
        if self._offered is not None and not self.run.runs(self._offered) and (self.partial or idle):
            loading = self.run.load_weights(self._offered, self._backlog.next_step)
            self._loading = self.run.in_background(loading, "load weights")
            self._loading.add_done_callback(self._loaded)
        else:
            self._start_new()

    def _loaded(self, task: asyncio.Task[None]) -> None:
        self._loading = None
        if not self._held:
            self._start_new()  # with these weights, should newer ones be offered already
        self._ended(task)

    def _start_new(self) -> None:
        if room := self._backlog.room(self.run.rollouts_after):
            groups = [self._group(prompt) for prompt in self.run.prompts.take(room)]
            self._backlog.add(groups)
            self._start(groups)

    def _group(self, prompt: Prompt) -> Group:
        return Group(prompt, self.run.generation.samples_per_prompt, self.run.rollouts_after)

    def _start(self, groups: Sequence[Group]) -> None:
        task = self.run.in_background(self._generate(groups), f"generate {len(groups)} prompts")
        task.add_done_callback(self._ended)

    async def _generate(self, groups: Sequence[Group]) -> None:
        by_ordinal = {group.prompt.ordinal: group for group in groups}

        def scored(sample: Sample) -> None:
            group = by_ordinal[sample.ordinal]
            group.samples.append(sample)
            if group.finished:
                self._advance()
                self._changed.set()

        await self.run.generation.sample(self._backlog.next_step, [group.prompt for group in groups], scored=scored)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._failure = self._failure or task.exception()
            self._advance()
            self._changed.set()

    async def _change(self) -> None:
        """Until something has happened. Raises what went wrong with a request or a load."""
        if self._failure is None:
            await self._changed.wait()
            self._changed.clear()
        if self._failure is not None:
            raise self._failure

    def _metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        mixed = [len(np.unique(sample.versions)) > 1 for sample in samples]
        return {
            "async/carried_over": float(len(self._backlog.groups)),
            "async/mixed_versions": float(np.mean(mixed)),
        }


def _capacity(batch_size: int, rollout: RolloutConfig) -> int:
    """How many prompts may be under way or waiting at a time."""
    return round(batch_size * (1 + rollout.over_sample_rate))
