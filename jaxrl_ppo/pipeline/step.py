"""What one step of a run computes, once for every mode; the modes differ only in the order in which they call it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_ppo.observability.metrics import batch_metrics, own_log_probs, time_metrics
from jaxrl_ppo.pipeline.batching import VALIDATION, make_batch, make_requests, make_sample, ordered, split_greedy
from jaxrl_ppo.pipeline.checkpoints import CRITIC, Checkpoints
from jaxrl_ppo.pipeline.dynamic_sampling import DynamicSampling, Scored
from jaxrl_ppo.pipeline.estimation import Estimation
from jaxrl_ppo.pipeline.measures import turn_metrics, validation_scores
from jaxrl_ppo.pipeline.protocols import Critic, Observer, Prompts, Rewards, Rollouts, Trainer
from jaxrl_ppo.rollout.agent_loop import AgentLoops
from jaxrl_ppo.rollout.engine import Request, SamplingParams
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.records import Batch, Prompt, Sample
from jaxrl_ppo.weights.manifest import WeightManifest

VERSIONS_REMEMBERED = 64  # weight versions whose step is known, for the staleness of samples
VALIDATION_STEP = -1  # where the timings of a validation's generation go, which are not a training step's


@dataclasses.dataclass(slots=True)
class Generated:
    """A batch as it comes from generation and reward; `samples` are its rows, in the same order."""

    batch: Batch
    samples: list[Sample]
    metrics: dict[str, float]
    frontier: dict[str, Any] | None = None  # where the prompt stream stood at the end, if more prompts were drawn


class DivergedError(RuntimeError):
    """The update cannot go on: its gradients are not finite."""


class Run:
    """A run's parts and its progress. `step` is the last finished step; steps count from 1."""

    def __init__(
        self,
        config: Config,
        *,
        trainer: Trainer,
        critic: Critic | None = None,
        rollouts: Rollouts,
        rewards: Rewards,
        prompts: Prompts,
        agents: AgentLoops,
        validation_prompts: Sequence[Prompt],
        total_steps: int,
        devices: int,
        checkpoints: Checkpoints,
        observer: Observer,
    ):
        """`devices` counts the accelerators of all pools. Raises UserCodeError for a user's broken estimator."""
        self.config = config
        self.critic = critic
        self.trainer, self.rollouts, self.rewards, self.prompts = trainer, rollouts, rewards, prompts
        self.agents = agents
        self.validation_prompts = validation_prompts
        self.total_steps, self.devices = total_steps, devices
        self.checkpoints, self.observer = checkpoints, observer
        self.estimation = Estimation(config)
        self.step = 0
        self._staged: WeightManifest | None = None
        self._loaded_version: int | None = None
        self._step_of_version: dict[int, int] = {}  # after which step each weight version came to be
        self._restored: Generated | None = None
        self._skips = {"actor": 0, "critic": 0}  # optimizer steps in a row
        self._metrics: dict[int, dict[str, float]] = defaultdict(dict)
        self._seconds: dict[int, dict[str, float]] = defaultdict(dict)
        self._trained: Batch | None = None
        self._generating: set[asyncio.Task[Generated]] = set()
        self._committing: asyncio.Task[None] | None = None
        self._began = time.time()

    # Progress

    def remaining_steps(self) -> Iterator[int]:
        """Every step that is still to be done."""
        self._began = time.time()
        yield from range(self.step + 1, self.total_steps + 1)

    def validates_at(self, step: int) -> bool:
        """Whether a validation follows this step: every `test_freq` steps and after the last one, if it is not -1."""
        every = self.config.trainer.test_freq
        return bool(self.validation_prompts) and every > 0 and (step % every == 0 or step == self.total_steps)

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint follows this step: every `save_freq` steps, and after the last one."""
        every = self.config.trainer.save_freq
        return every > 0 and (step % every == 0 or step == self.total_steps)

    def finish(self, step: int) -> None:
        """Record the step's metrics; nothing of it is left to do."""
        now = time.time()
        seconds = self._seconds.pop(step) | {"step": now - self._began}
        self._began = now
        self.step = step
        assert self._trained is not None
        metrics = self._metrics.pop(step) | time_metrics(seconds, self._trained, devices=self.devices)
        self.observer.step(step, metrics)

    async def close(self) -> None:
        """Wait until the last checkpoint is committed, and stop generating."""
        try:
            if self._committing is not None:
                committing, self._committing = self._committing, None
                await committing
        finally:
            for task in self._generating:
                task.cancel()
            await asyncio.gather(*self._generating, return_exceptions=True)

    @contextlib.contextmanager
    def _phase(self, name: str, step: int, track: str | None = None) -> Iterator[None]:
        """Time a phase: `timing_s/<name>` of the step, and a span on its track of the timeline."""
        begin = time.time()
        with self.observer.span(name, track=track or name, step=step):
            yield
        self._seconds[step][name] = self._seconds[step].get(name, 0.0) + time.time() - begin

    # Generation and reward

    def start_generating(self, step: int) -> asyncio.Task[Generated]:
        """Take the next prompts, and generate the batch of `step` from them in the background.

        The replicas first load the weights that are the newest now, so that the trainer need not wait for it.
        """
        data = self.config.data
        filtered = self.config.algorithm.filter_groups.enable
        count = data.gen_batch_size if filtered and data.gen_batch_size else data.train_batch_size
        generating = self._generate(step, self.prompts.take(count), self._staged)
        task = asyncio.create_task(generating, name=f"generate step {step}")
        self._generating.add(task)
        task.add_done_callback(self._generating.discard)
        return task

    def restored_batch(self) -> asyncio.Future[Generated] | None:
        """The batch that was pending when the checkpoint was taken that the run resumed from, if any."""
        if self._restored is None:
            return None
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        future.set_result(self._restored)
        self._restored = None
        return future

    async def _generate(self, step: int, prompts: list[Prompt], weights: WeightManifest | None) -> Generated:
        if weights is not None:
            await self._load(weights, step)
        rollout = self.config.actor_rollout_ref.rollout
        sampling = SamplingParams(
            max_new_tokens=rollout.response_length,
            temperature=rollout.temperature if rollout.do_sample else 0.0,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            ignore_eos=rollout.ignore_eos,
        )
        greedy = self.estimation.needs("greedy_scores")

        async def respond(prompts: Sequence[Prompt], scored: Scored = lambda _: None) -> list[Sample]:
            requests = make_requests(prompts, rollout.n, sampling, seed=rollout.seed, greedy=greedy)
            return await self._sample(step, prompts, requests, scored)

        frontier, metrics = None, dict[str, float]()
        if self.config.algorithm.filter_groups.enable:
            begin = time.time()
            filled = await DynamicSampling(self.config, rollout.n + greedy).fill(prompts, self.prompts.take, respond)
            self._seconds[step] |= {"gen": time.time() - begin, "reward": 0.0}  # the calls' own times overlap
            prompts, samples, metrics = filled.prompts, filled.samples, filled.metrics
            frontier = self.prompts.state()
        else:
            samples = await respond(prompts)
        samples, greedy_scores = split_greedy(ordered(prompts, samples), rollout.n)
        batch = make_batch(prompts, samples, rollout.response_length, greedy_scores)
        metrics |= self.rewards.batch_report(f"step {step}") | turn_metrics(samples)
        return Generated(batch, samples, metrics, frontier)

    async def _sample(
        self,
        step: int,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        scored: Scored = lambda _: None,
    ) -> list[Sample]:
        """Generate, and score each sample as soon as it is there; `scored` is told of each."""
        by_ordinal = {prompt.ordinal: prompt for prompt in prompts}
        samples: list[Sample] = []

        async def score(sample: Sample) -> None:
            await self.rewards.score(by_ordinal[sample.ordinal], sample)
            scored(sample)

        async with asyncio.TaskGroup() as group:
            scoring: list[asyncio.Task[None]] = []
            with self._phase("gen", step, "generation"):
                asked = [by_ordinal[int(request.id.partition(".")[0])] for request in requests]
                outside = functools.partial(self.observer.span, "tools", track="tools", step=step)
                async for completion in self.agents.generate(self.rollouts, requests, asked, outside):
                    sample = make_sample(completion)
                    samples.append(sample)
                    scoring.append(group.create_task(score(sample)))
            with self._phase("reward", step):  # what it still takes after the last token
                await asyncio.gather(*scoring)
        return samples

    # Training

    async def train(self, step: int, generated: Generated) -> None:
        """Everything from the rewards to the next weights, whose bytes are staged for the rollouts at the end."""
        batch = generated.batch
        metrics = self._metrics[step]
        metrics |= generated.metrics
        metrics["training/global_step"] = step
        metrics["training/staleness"] = self._staleness(step, batch)
        if self.config.algorithm.rollout_correction.bypass_mode:
            batch.old_log_probs = batch.rollout_log_probs
        else:
            with self._phase("old_log_prob", step):
                batch.old_log_probs = await self.trainer.log_probs(batch)
        if self.estimation.needs("sum_pi_squared"):
            with self._phase("sum_pi_squared", step):
                batch.sum_pi_squared = await self.trainer.sum_pi_squared(batch, own_log_probs(batch))
        if self.estimation.needs_reference:
            with self._phase("ref", step):
                batch.ref_log_probs = await self.trainer.ref_log_probs(batch)
        if self.critic is not None:
            with self._phase("values", step):
                batch.values = await self.critic.values(batch)
        with self._phase("adv", step, "advantage"):
            metrics |= await asyncio.to_thread(self.estimation.estimate, batch, generated.samples)
        data = self.config.data
        metrics |= batch_metrics(
            batch, max_prompt_length=data.max_prompt_length, max_response_length=data.max_response_length
        )
        metrics |= await self._update(step, self.estimation.to_learn_from(batch, step))
        self._count_skips(step, metrics)
        with self._phase("stage_weights", step, "weight_sync"):
            await self._stage(step)
        await asyncio.to_thread(self.observer.rollout, step, batch, generated.samples)
        self.prompts.update(batch.prompts, generated.samples)
        self._trained = batch

    async def _update(self, step: int, batch: Batch) -> dict[str, float]:
        """The critic's update and the actor's; at the same time where each has devices of its own."""

        async def update_critic() -> dict[str, float]:
            if self.critic is None:
                return {}
            with self._phase("update_critic", step):
                return await self.critic.update(batch)

        async def update_actor() -> dict[str, float]:
            if step <= self.config.trainer.critic_warmup:
                return {}
            with self._phase("update_actor", step):
                return await self.trainer.update_actor(batch)

        if self.config.critic.enable_resource_pool:
            critic, actor = await asyncio.gather(update_critic(), update_actor())
        else:
            critic, actor = await update_critic(), await update_actor()
        return critic | actor

    def _count_skips(self, step: int, metrics: dict[str, float]) -> None:
        """Stop when the gradient has not been finite for too many optimizer steps in a row."""
        limit = self.config.trainer.max_consecutive_skips
        for model, key in (("actor", "actor_rollout_ref.actor"), ("critic", "critic")):
            skipped = int(metrics.get(f"{model}/skipped_updates", 0))
            made = f"{model}/grad_norm" in metrics  # there only if a step was made
            self._skips[model] = skips = 0 if made else self._skips[model] + skipped
            if skips >= limit:
                raise DivergedError(
                    f"step {step}: the {model}'s gradient was not finite in the last {skips} optimizer steps, all "
                    f"skipped (trainer.max_consecutive_skips={limit}). Lower {key}.optim.lr, or look for extreme "
                    f"rewards and log-probs in the run's samples; the weights are those of the last good step."
                )

    def _staleness(self, step: int, batch: Batch) -> float:
        """The largest number of updates between the weights that wrote a token and those that it now trains."""
        versions = batch.versions[batch.response_mask > 0]
        written_after = self._step_of_version[int(versions.min())] if versions.size else step - 1
        return float(step - 1 - written_after)

    # Weights

    async def _stage(self, step: int) -> WeightManifest:
        self._staged = await self.trainer.stage_weights()
        self._step_of_version[self._staged.version] = step  # a step may leave the weights as they were
        for version in sorted(self._step_of_version)[:-VERSIONS_REMEMBERED]:
            del self._step_of_version[version]
        return self._staged

    async def sync_weights(self) -> None:
        """Bring every replica to the newest weights; free when it runs them already."""
        manifest = self._staged or await self._stage(self.step)  # nothing staged yet: a fresh start, or a resume
        await self._load(manifest, self.step + 1)

    async def _load(self, manifest: WeightManifest, step: int) -> None:
        if manifest.version != self._loaded_version:
            with self._phase("update_weights", step, "weight_sync"):
                await self.rollouts.load_weights(manifest)
            self._loaded_version = manifest.version

    # Validation

    async def validate_before(self) -> None:
        """The validation before the first step, unless `val_before_train` is off."""
        if self.config.trainer.val_before_train and self.validation_prompts:
            await self.validate(self.step)

    async def validate(self, step: int) -> None:
        """Score the weights that the replicas run on the validation prompts."""
        rollout = self.config.actor_rollout_ref.rollout
        kwargs = rollout.val_kwargs
        sampling = SamplingParams(
            max_new_tokens=rollout.response_length,
            temperature=kwargs.temperature if kwargs.do_sample else 0.0,
            top_k=kwargs.top_k,
            top_p=kwargs.top_p,
            ignore_eos=rollout.ignore_eos,
        )
        prompts = self.validation_prompts
        requests = make_requests(prompts, kwargs.n, sampling, seed=rollout.seed, purpose=VALIDATION)
        with self._phase("testing", step, "validation"):
            samples = ordered(prompts, await self._sample(VALIDATION_STEP, prompts, requests))
        by_ordinal = {prompt.ordinal: prompt for prompt in prompts}
        asked = [by_ordinal[sample.ordinal] for sample in samples]
        rewards = self.rewards.batch_report(f"validation at step {step}")
        metrics = validation_scores(asked, samples) | turn_metrics(samples, "val-aux/")
        metrics |= {f"val-aux/{name}": value for name, value in rewards.items()}
        self.observer.validation(step, asked, samples, metrics)
        if step > self.step:
            self._metrics[step] |= metrics

    # Checkpoints

    async def checkpoint(self, step: int, pending: asyncio.Future[Generated] | None = None) -> None:
        """Start a checkpoint of everything up to `step`; it commits once the state and the pending batch have landed.

        The prompt stream is saved as of the first prompt that is in neither a trained batch nor the pending one.
        """
        if self._committing is not None:
            await self._committing
        folder = self.checkpoints.begin(step)
        controller = {
            "step": step,
            "prompts": self.prompts.state(),
            "estimation": self.estimation.state(),
            "step_of_version": dict(self._step_of_version),
            "pending": None,
        }
        with self._phase("save_checkpoint", step, "checkpoint"):
            await self.trainer.save(folder / "actor")
            if "hf_model" in self.config.actor_rollout_ref.actor.checkpoint.save_contents:
                await self.trainer.save_pretrained(folder / "huggingface")
            if self.critic is not None:
                await self.critic.save(folder / CRITIC)
                if "hf_model" in self.config.critic.checkpoint.save_contents:
                    await self.critic.save_pretrained(folder / f"huggingface_{CRITIC}")
        if step == self.total_steps:
            pending = None
        self._committing = asyncio.create_task(self._commit(step, controller, pending), name=f"checkpoint {step}")

    async def _commit(self, step: int, controller: dict[str, Any], pending: asyncio.Future[Generated] | None) -> None:
        with self.observer.span("commit", track="checkpoint", step=step):
            if pending is not None:
                drawing = not pending.done()  # then prompts may have been drawn after `controller` was made
                generated = controller["pending"] = await pending
                if drawing and generated.frontier is not None:
                    controller["prompts"] = generated.frontier
            await self.trainer.wait_until_saved()
            if self.critic is not None:
                await self.critic.wait_until_saved()
            await asyncio.to_thread(self.checkpoints.commit, step, controller)

    def restore(self, controller: dict[str, Any]) -> None:
        """Take up the controller's part of a checkpoint; the trainer restores its own."""
        self.step = controller["step"]
        self.prompts.restore(controller["prompts"])
        self.estimation.restore(controller["estimation"])
        self._step_of_version = controller["step_of_version"]
        self._restored = controller["pending"]
