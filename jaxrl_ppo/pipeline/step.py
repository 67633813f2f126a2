"""What one step of a run computes, once for every mode; the modes differ only in the order in which they call it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_ppo.pipeline.batching import TRAINING, VALIDATION, make_batch, make_requests, make_sample
from jaxrl_ppo.pipeline.checkpoints import Checkpoints
from jaxrl_ppo.pipeline.estimation import Estimation
from jaxrl_ppo.pipeline.measures import step_metrics, validation_metrics
from jaxrl_ppo.pipeline.protocols import Observer, Prompts, Rewards, Rollouts, Trainer
from jaxrl_ppo.rollout.engine import SamplingParams
from jaxrl_ppo.rollout.probe import check_probe
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.records import Batch, Prompt, Sample


class Run:
    """A run's parts and its progress. `step` is the last finished step; steps count from 1."""

    def __init__(
        self,
        config: Config,
        *,
        trainer: Trainer,
        rollouts: Rollouts,
        rewards: Rewards,
        prompts: Prompts,
        validation_prompts: Sequence[Prompt],
        total_steps: int,
        steps_per_epoch: int,
        checkpoints: Checkpoints,
        observer: Observer,
    ):
        self.config = config
        self.trainer, self.rollouts, self.rewards, self.prompts = trainer, rollouts, rewards, prompts
        self.validation_prompts = validation_prompts
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.checkpoints, self.observer = checkpoints, observer
        self.estimation = Estimation(config)
        self.step = 0
        self._loaded_version: int | None = None
        self._previous_probe: np.ndarray | None = None
        self._step_of_version: dict[int, int] = {}
        self._restored_batch: Batch | None = None
        self._metrics: dict[int, dict[str, float]] = defaultdict(dict)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._commit: asyncio.Task[None] | None = None
        self._finished_at = time.time()

    # Progress

    def remaining_steps(self) -> Iterator[int]:
        """Every step that is still to be done."""
        self._finished_at = time.time()
        yield from range(self.step + 1, self.total_steps + 1)

    def validates_at(self, step: int) -> bool:
        """Whether a validation follows this step: every `test_freq` steps, and after the last one."""
        every = self.config.trainer.test_freq
        return bool(self.validation_prompts) and every > 0 and (step % every == 0 or step == self.total_steps)

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint follows this step: every `save_freq` steps, and after the last one."""
        every = self.config.trainer.save_freq
        return every > 0 and (step % every == 0 or step == self.total_steps)

    def finish(self, step: int) -> None:
        """Record the step's metrics; nothing of it is left to do."""
        now = time.time()
        metrics = self._metrics.pop(step)
        metrics["timing_s/step"] = now - self._finished_at
        self._finished_at = now
        self.step = step
        self.observer.step(step, metrics)

    async def close(self) -> None:
        """Wait for the last checkpoint to be committed, and stop what is still running."""
        if self._commit is not None:
            await self._commit
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextlib.contextmanager
    def _phase(self, name: str, track: str, step: int) -> Iterator[None]:
        begin = time.time()
        with self.observer.span(name, track=track, step=step):
            yield
        key = f"timing_s/{name}"
        self._metrics[step][key] = self._metrics[step].get(key, 0.0) + time.time() - begin

    # Generation and reward

    def start_generating(self, step: int) -> asyncio.Task[Batch]:
        """Take the next prompts and generate the batch of `step` from them in the background."""
        task = asyncio.create_task(self._generate(step, self.prompts.next_batch()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def generate(self, step: int) -> Batch:
        """The batch of `step`: its samples with their rewards."""
        return await self.start_generating(step)

    def pending_batch(self) -> asyncio.Future[Batch] | None:
        """The batch that had been generated when the checkpoint was taken, if the run resumed from one."""
        if self._restored_batch is None:
            return None
        future: asyncio.Future[Batch] = asyncio.get_running_loop().create_future()
        future.set_result(self._restored_batch)
        self._restored_batch = None
        return future

    async def _generate(self, step: int, prompts: list[Prompt]) -> Batch:
        rollout = self.config.actor_rollout_ref.rollout
        greedy = not rollout.do_sample
        sampling = SamplingParams(
            max_new_tokens=rollout.response_length,
            temperature=0.0 if greedy else rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            ignore_eos=rollout.ignore_eos,
        )
        requests = make_requests(prompts, rollout.n, sampling, seed=rollout.seed, purpose=TRAINING)
        samples = await self._sample(step, prompts, requests)
        self._metrics[step] |= self.rewards.batch_report()
        self.observer.samples(step, prompts, samples, validation=False)
        return make_batch(prompts, samples, rollout.response_length)

    async def _sample(self, step: int, prompts: Sequence[Prompt], requests: Sequence[Any]) -> list[Sample]:
        """Generate, and score each sample as soon as it is there."""
        by_ordinal = {prompt.ordinal: prompt for prompt in prompts}
        samples: list[Sample] = []
        async with asyncio.TaskGroup() as scoring:
            with self._phase("gen", "generation", step):
                async for completion in self.rollouts.generate(requests):
                    sample = make_sample(completion)
                    samples.append(sample)
                    scoring.create_task(self.rewards.score(by_ordinal[sample.ordinal], sample))
            rewarding = time.time()
        # what the reward function still took after the last token
        self._metrics[step]["timing_s/reward"] = time.time() - rewarding
        return samples

    # Training

    async def train(self, step: int, batch: Batch) -> None:
        """Everything between the rewards and the next weights, whose bytes are staged for the rollout at the end."""
        config = self.config
        metrics = self._metrics[step]
        metrics["training/staleness"] = self._staleness(step, batch)
        metrics["training/epoch"] = (step - 1) / self.steps_per_epoch
        if config.algorithm.rollout_correction.bypass_mode:
            batch.old_log_probs = batch.rollout_log_probs
        else:
            with self._phase("old_log_prob", "trainer", step):
                batch.old_log_probs = await self.trainer.log_probs(batch)
        if self.estimation.needs_reference:
            with self._phase("ref", "trainer", step):
                batch.ref_log_probs = await self.trainer.ref_log_probs(batch)
        with self._phase("adv", "trainer", step):
            metrics |= await asyncio.to_thread(self.estimation.estimate, batch)
        with self._phase("update_actor", "trainer", step):
            metrics |= await self.trainer.update_actor(batch)
        metrics |= step_metrics(batch, config)
        with self._phase("stage_weights", "weight_sync", step):
            self._staged = await self.trainer.stage_weights()
        self._step_of_version[self._staged.version] = step

    def _staleness(self, step: int, batch: Batch) -> float:
        """Largest number of updates between the weights that wrote a token and those that it now trains."""
        versions = batch.versions[batch.response_mask > 0]
        oldest = int(versions.min()) if versions.size else max(self._step_of_version)
        return float(step - 1 - self._step_of_version[oldest])

    # Weights

    async def sync_weights(self) -> None:
        """Bring every replica to the newest weights, and see that it runs them. Free when it does already."""
        if not self._step_of_version:  # nothing trained in this process yet: fresh start or resume
            self._staged = await self.trainer.stage_weights()
            self._step_of_version[self._staged.version] = self.step
        manifest = self._staged
        if manifest.version == self._loaded_version:
            return
        with self._phase("update_weights", "weight_sync", self.step + 1):
            await self.rollouts.load_weights(manifest)
            await self._probe(manifest.version)
        self._loaded_version = manifest.version

    async def _probe(self, version: int) -> None:
        probe = self.probe_tokens()
        expected, *measured = await asyncio.gather(self.trainer.score_tokens(probe), self.rollouts.score(probe))
        metrics = check_probe(
            expected, measured[0], previous=self._previous_probe, version=version, dtype=self.config.actor_rollout_ref.rollout.dtype
        )
        self._metrics[self.step + 1] |= metrics
        self._previous_probe = expected

    def probe_tokens(self) -> list[int]:
        """A prompt of the data, the same in every process and after a resume: what weight syncs are checked with."""
        return list(self.probe)

    # Validation

    async def validate_before(self) -> None:
        """The validation before the first step, unless `val_before_train` is off."""
        if self.config.trainer.val_before_train and self.validation_prompts:
            await self.validate(self.step)

    async def validate(self, step: int) -> dict[str, float]:
        """Score the current weights on the validation prompts."""
        rollout = self.config.actor_rollout_ref.rollout
        kwargs = rollout.val_kwargs
        sampling = SamplingParams(
            max_new_tokens=rollout.response_length,
            temperature=kwargs.temperature if kwargs.do_sample else 0.0,
            top_k=kwargs.top_k,
            top_p=kwargs.top_p,
            ignore_eos=rollout.ignore_eos,
        )
        requests = make_requests(self.validation_prompts, kwargs.n, sampling, seed=rollout.seed, purpose=VALIDATION)
        with self._phase("testing", "validation", step):
            samples = await self._sample(step, self.validation_prompts, requests)
        metrics = validation_metrics(self.validation_prompts, samples)
        self.observer.samples(step, self.validation_prompts, samples, validation=True)
        self.observer.validation(step, metrics)
        self._metrics[step] |= metrics
        return metrics

    # Checkpoints

    async def checkpoint(self, step: int, pending: asyncio.Future[Batch] | None = None) -> None:
        """Start a checkpoint of everything up to `step`; it commits once the state and the pending batch have landed.

        The prompt stream is saved as of the first prompt that is in neither a trained batch nor the pending one.
        """
        if self._commit is not None:
            await self._commit
        folder = self.checkpoints.begin(step)
        controller = {
            "step": step,
            "prompts": self.prompts.state(),
            "estimation": self.estimation.state(),
            "step_of_version": dict(self._step_of_version),
        }
        with self._phase("save_checkpoint", "checkpoint", step):
            await self.trainer.save(folder / "actor")
        self._commit = asyncio.create_task(self._commit_checkpoint(step, controller, pending))

    async def _commit_checkpoint(
        self, step: int, controller: dict[str, Any], pending: asyncio.Future[Batch] | None
    ) -> None:
        with self.observer.span("commit", track="checkpoint", step=step):
            controller["pending"] = None if pending is None or step == self.total_steps else await pending
            await self.trainer.wait_until_saved()
            version = self._staged.version
            await asyncio.to_thread(self.checkpoints.commit, step, controller, {"version": version})

    def restore(self, controller: dict[str, Any]) -> None:
        """Take up the controller's part of a checkpoint; the trainer has restored its own."""
        self.step = controller["step"]
        self.prompts.restore(controller["prompts"])
        self.estimation.restore(controller["estimation"])
        self._resumed_versions = controller["step_of_version"]
        self._restored_batch = controller["pending"]
