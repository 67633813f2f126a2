"""What one step of a run computes, once for every mode; the modes differ only in the order in which they call it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from jaxrl_ppo.observability.metrics import batch_metrics, own_log_probs, time_metrics
from jaxrl_ppo.pipeline.backlog import Group
from jaxrl_ppo.pipeline.batching import make_batch, make_sample, ordered
from jaxrl_ppo.pipeline.checkpoints import Checkpoints
from jaxrl_ppo.pipeline.estimation import Estimation
from jaxrl_ppo.pipeline.generation import Generated, Generation
from jaxrl_ppo.pipeline.measures import turn_metrics, validation_scores
from jaxrl_ppo.pipeline.protocols import Critic, Observer, Prompts, Rewards, Rollouts, Trainer
from jaxrl_ppo.pipeline.saving import Saving
from jaxrl_ppo.rollout.agent_loop import AgentLoops
from jaxrl_ppo.rollout.contract import Contract, check_completions, check_log_probs
from jaxrl_ppo.schema import sizes
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.records import Batch, Prompt, Sample
from jaxrl_ppo.weights.manifest import WeightManifest

T = TypeVar("T")

VERSIONS_REMEMBERED = 64  # weight versions whose step is known, for the staleness of samples


class StalenessError(RuntimeError):
    """A batch with samples older than the mode allows, or from weights that the trainer never had."""


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
        identity: Mapping[str, Any],
        contract: Contract | None,
    ):
        """`devices` counts the accelerators of all pools; `identity`, what the run is made of, goes into checkpoints.

        `contract` is checked before the first step. Raises UserCodeError for a user's broken estimator.
        """
        self.config = config
        self.critic = critic
        self.trainer, self.rollouts, self.rewards, self.prompts = trainer, rollouts, rewards, prompts
        self.validation_prompts = validation_prompts
        self.total_steps, self.devices = total_steps, devices
        self.observer, self.contract = observer, contract
        self.saving = Saving(self, checkpoints, identity)
        self.estimation = Estimation(config)
        self.generation = Generation(
            config, rollouts, rewards, agents, observer, greedy=self.estimation.needs("greedy_scores")
        )
        self.step = 0
        self.staged: WeightManifest | None = None
        self._loaded_version: int | None = None
        self._step_of_version: dict[int, int] = {}  # after which step each weight version came to be
        self._restored: Any = None  # a Generated, or the groups of an asynchronous run
        self._skips = {"actor": 0, "critic": 0}  # optimizer steps in a row
        self._metrics: dict[int, dict[str, float]] = defaultdict(dict)
        self._seconds: dict[int, dict[str, float]] = defaultdict(dict)
        self._trained: Batch | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._began = time.time()
        self._stop_asked = False
        self.begun = False  # a step: until then, there is nothing that a stop would lose

    # Progress

    def remaining_steps(self) -> Iterator[int]:
        """Every step that is still to be done; no further one once `stop` was called and the last one is saved."""
        self._began = time.time()
        for step in range(self.step + 1, self.total_steps + 1):
            self.saving.check()
            if self._stop_asked and (self._trained is None or self.saving.step == self.step):
                return
            self.begun = True
            yield step

    def stop(self) -> None:
        """End after the step under way, with a checkpoint of it."""
        self._stop_asked = True

    def validates_at(self, step: int) -> bool:
        """Whether a validation follows this step: every `test_freq` steps and after the last one, if it is not -1."""
        every = self.config.trainer.test_freq
        return bool(self.validation_prompts) and every > 0 and (step % every == 0 or step == self.total_steps)

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint follows this step: every `save_freq` steps, after the last one, and before a stop."""
        every = self.config.trainer.save_freq
        return self._stop_asked or (every > 0 and (step % every == 0 or step == self.total_steps))

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
            await self.saving.finish()
        finally:
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)

    def waiting_for_rollouts(self, step: int) -> AbstractContextManager[None]:
        """Time the wait for a batch; it is the step's `timing_s/gen` where generation goes on all the time."""
        return self.phase("gen", step, "wait")

    @contextlib.contextmanager
    def phase(self, name: str, step: int, track: str | None = None) -> Iterator[None]:
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
        generating = self._generate(step, self.prompts.take(count), self.staged)
        return self.in_background(generating, f"generate step {step}")

    def in_background(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """A task that `close` ends."""
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def restored_batch(self) -> asyncio.Future[Generated] | None:
        """The batch that was pending when the checkpoint was taken that the run resumed from, if any."""
        if self._restored is None:
            return None
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        future.set_result(self._restored)
        self._restored = None
        return future

    def restored_groups(self) -> list[Group]:
        """Likewise, what an asynchronous run had started and not trained."""
        groups, self._restored = self._restored or [], None
        return groups

    async def _generate(self, step: int, prompts: list[Prompt], weights: WeightManifest | None) -> Generated:
        if weights is not None:
            await self.load_weights(weights, step)
        return await self.generation.fill(step, prompts, self.prompts, self._seconds[step])

    # Training

    async def train(self, step: int, generated: Generated) -> None:
        """Everything from the rewards to the next weights, whose bytes are staged for the rollouts at the end."""
        batch = generated.batch
        metrics = self._metrics[step]
        metrics |= generated.metrics
        if failures := int(generated.metrics.get("reward/failures", 0)):
            self.observer.fault("rewards_failed", f"step {step}: {failures} samples have no reward, and count as 0")
        metrics["training/global_step"] = step
        metrics |= self._staleness(step, generated.samples)
        if self.config.algorithm.rollout_correction.bypass_mode:
            batch.old_log_probs = batch.rollout_log_probs
        else:
            with self.phase("old_log_prob", step):
                batch.old_log_probs = await self.trainer.log_probs(batch)
        if self.estimation.needs("sum_pi_squared"):
            with self.phase("sum_pi_squared", step):
                batch.sum_pi_squared = await self.trainer.sum_pi_squared(batch, own_log_probs(batch))
        if self.estimation.needs_reference:
            with self.phase("ref", step):
                batch.ref_log_probs = await self.trainer.ref_log_probs(batch)
        if self.critic is not None:
            with self.phase("values", step):
                batch.values = await self.critic.values(batch)
        with self.phase("adv", step, "advantage"):
            metrics |= await asyncio.to_thread(self.estimation.estimate, batch, generated.samples)
        data = self.config.data
        metrics |= batch_metrics(
            batch, max_prompt_length=data.max_prompt_length, max_response_length=data.max_response_length
        )
        metrics |= await self._update(step, self.estimation.to_learn_from(batch, step))
        self._count_skips(step, metrics)
        if self._stages_at(step):
            with self.phase("stage_weights", step, "weight_sync"):
                await self._stage(step)
        await asyncio.to_thread(self.observer.rollout, step, batch, generated.samples)
        self.prompts.update(batch.prompts, generated.samples)
        self._trained = batch

    async def _update(self, step: int, batch: Batch) -> dict[str, float]:
        """The critic's update and the actor's; at the same time where each has devices of its own."""

        async def update_critic() -> dict[str, float]:
            if self.critic is None:
                return {}
            with self.phase("update_critic", step):
                return await self.critic.update(batch)

        async def update_actor() -> dict[str, float]:
            if step <= self.config.trainer.critic_warmup:
                return {}
            with self.phase("update_actor", step):
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

    def _staleness(self, step: int, samples: Sequence[Sample]) -> dict[str, float]:
        """How many updates lie between the weights that wrote a sample's oldest token and those that it now trains.

        Raises StalenessError past the mode's limit: the order of events has to rule that out.
        """
        written = [sample.versions[sample.mask > 0] for sample in samples]
        oldest = [int(versions.min()) for versions in written if len(versions)]
        ages = [step - 1 - self._step_of_version.get(version, -1) for version in oldest] or [0]
        limit = sizes.staleness(self.config)
        if not 0 <= min(ages) <= max(ages) <= limit:
            raise StalenessError(
                f"step {step}: samples are {min(ages)} to {max(ages)} updates old (weight versions "
                f"{min(oldest)} to {max(oldest)}), and trainer.mode={self.config.trainer.mode} allows 0 to {limit}"
            )
        return {"training/staleness": float(max(ages)), "training/staleness_mean": sum(ages) / len(ages)}

    # Weights

    def _stages_at(self, step: int) -> bool:
        """Whether the weights of this step are for the rollouts: all of them, but in asynchronous mode.

        There it is every `trigger_parameter_sync_step`-th, unless the rollouts have not come to load those before: the
        stores keep two versions, and a replica that is replaced needs the one that the others run.
        """
        if self.config.trainer.mode != "async" or self.validates_at(step):
            return True
        on_time = step % self.config.async_training.trigger_parameter_sync_step == 0
        return on_time and self.staged is not None and self.runs(self.staged)

    async def _stage(self, step: int) -> WeightManifest:
        self.staged = await self.trainer.stage_weights()
        self._step_of_version[self.staged.version] = step  # a step may leave the weights as they were
        for version in sorted(self._step_of_version)[:-VERSIONS_REMEMBERED]:
            del self._step_of_version[version]
        return self.staged

    async def sync_weights(self) -> None:
        """Bring every replica to the newest weights; free when it runs them already."""
        manifest = self.staged or await self._stage(self.step)  # nothing staged yet: a fresh start, or a resume
        await self.load_weights(manifest, self.step + 1)

    def runs(self, manifest: WeightManifest) -> bool:
        """Whether the rollouts run these weights."""
        return manifest.version == self._loaded_version

    @property
    def rollouts_after(self) -> int:
        """The step that made the weights which the rollouts run."""
        assert self._loaded_version is not None
        return self._step_of_version[self._loaded_version]

    async def check_contract(self) -> None:
        """Compare the engine's log-probs with the trainer's, whose weights it runs. Raises ContractMismatch."""
        if self.contract is None:
            return
        prompts, rollout = self.contract.prompts, self.config.actor_rollout_ref.rollout
        with self.observer.span("contract", track="weight_sync", step=self.step):
            sampling, completions = await self.generation.probe(prompts)
            await self.sleep_rollouts()
            check_completions(completions, sampling, self.contract.end_ids)
            samples = ordered(prompts, [make_sample(completion) for completion in completions])
            for sample in samples:
                sample.reward = 0.0
            batch = make_batch(prompts, samples, rollout.response_length)
            expected = await self.trainer.log_probs(batch)
            at_one = expected if rollout.temperature == 1 else await self.trainer.log_probs(batch, temperature=1.0)
        sampled = batch.response_mask > 0
        check_log_probs(
            batch.rollout_log_probs[sampled],
            expected[sampled],
            at_one=at_one[sampled],
            temperature=rollout.temperature,
            contract=self.contract,
        )
        await self.sync_weights()

    async def load_weights(self, manifest: WeightManifest, step: int) -> None:
        """Bring every replica to `manifest`'s weights, in the time of `step`."""
        if not self.runs(manifest):
            with self.phase("update_weights", step, "weight_sync"):
                await self.rollouts.load_weights(manifest)
            self._loaded_version = manifest.version

    async def sleep_rollouts(self) -> None:
        """Have the rollouts free the devices that they share with the trainer, until weights are loaded again."""
        if sizes.takes_turns(self.config) and self.config.actor_rollout_ref.rollout.free_cache_engine:
            with self.observer.span("sleep", track="weight_sync", step=self.step + 1):
                await self.rollouts.sleep()
            self._loaded_version = None

    # Validation

    async def validate_before(self) -> None:
        """The validation before the first step, unless `val_before_train` is off."""
        if self.config.trainer.val_before_train and self.validation_prompts:
            await self.validate(self.step)

    async def validate(self, step: int) -> None:
        """Score the weights that the replicas run on the validation prompts."""
        prompts = self.validation_prompts
        with self.phase("testing", step, "validation"):
            samples = ordered(prompts, await self.generation.answer(prompts))
        by_ordinal = {prompt.ordinal: prompt for prompt in prompts}
        asked = [by_ordinal[sample.ordinal] for sample in samples]
        rewards = self.rewards.batch_report(f"validation at step {step}")
        metrics = validation_scores(asked, samples) | turn_metrics(samples, "val-aux/")
        metrics |= {f"val-aux/{name}": value for name, value in rewards.items()}
        self.observer.validation(step, asked, samples, metrics)
        if step > self.step:
            self._metrics[step] |= metrics

    # Resume

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of the run beside its models and its samples, as of now."""
        return {
            "prompts": self.prompts.state(),
            "estimation": self.estimation.state(),
            "step_of_version": dict(self._step_of_version),
        }

    def restore(self, controller: dict[str, Any]) -> None:
        """Take up the controller's part of a checkpoint; the trainer and the prompt stream restore their own."""
        self.step = controller["step"]
        self.estimation.restore(controller["estimation"])
        self._step_of_version = controller["step_of_version"]
        self._restored = controller["pending"]
