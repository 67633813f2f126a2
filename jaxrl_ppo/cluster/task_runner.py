"""The controller of a run: prepares everything in a verl reader's order, then runs the pipeline. One Ray actor."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import yaml

from jaxrl_ppo.cluster.before_ray import check_mode
from jaxrl_ppo.cluster.identity import check_identity, identity
from jaxrl_ppo.cluster.judge_group import JudgeGroup
from jaxrl_ppo.cluster.pools import ResourcePoolManager, Role
from jaxrl_ppo.cluster.process import enter
from jaxrl_ppo.cluster.reward_model_group import RewardModelGroup
from jaxrl_ppo.cluster.roles import create_resource_pool_manager, create_role_worker_mapping
from jaxrl_ppo.cluster.rollout_group import RolloutGroup
from jaxrl_ppo.cluster.run_lock import run_lock
from jaxrl_ppo.cluster.stores import WeightStores
from jaxrl_ppo.cluster.trainer_group import CriticGroup, TrainerGroup
from jaxrl_ppo.cluster.workers import Workers
from jaxrl_ppo.data import PromptStream, copy_to_local, create_rl_dataset, create_rl_sampler, hf_processor, hf_tokenizer
from jaxrl_ppo.models.config import load_decoder_config
from jaxrl_ppo.observability.observer import RunObserver
from jaxrl_ppo.pipeline import asynchronous, one_step_off, sync
from jaxrl_ppo.pipeline.algorithm_checks import check_algorithms
from jaxrl_ppo.pipeline.checkpoints import KEPT_BY_DEFAULT, CheckpointError, Checkpoints, nothing_to_do
from jaxrl_ppo.pipeline.step import Run
from jaxrl_ppo.rewards import RewardManager
from jaxrl_ppo.rewards.model import RewardModel, SequenceMaker
from jaxrl_ppo.rollout.agent_loop import create_agent_loops
from jaxrl_ppo.rollout.contract import Contract
from jaxrl_ppo.rollout.probe import THRESHOLDS, WeightProbe
from jaxrl_ppo.rollout.router import Router
from jaxrl_ppo.rollout.select import resolve_engine_name
from jaxrl_ppo.schema import sizes
from jaxrl_ppo.schema.rules_reward_model import judge_served

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jaxrl_ppo.rollout.router import OnFault
    from jaxrl_ppo.schema.config import Config
    from jaxrl_ppo.schema.records import Prompt

CONTRACT_PROMPTS = 4  # on which engine and trainer are compared before the first step
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16"}  # verl's short ones


class TaskRunner:
    """Synchronous PPO. `run` does the work; `events` is what the driver's console shows of it."""

    fit = staticmethod(sync.fit)

    def __init__(self, folder: str):
        """`folder` is the driver's working directory, which relative paths of the configuration start from."""
        enter(folder)
        self._events: asyncio.Queue[tuple[Any, ...] | None] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None
        self._pipeline: Run | None = None
        self._stop_asked = False

    async def events(self) -> AsyncIterator[tuple[Any, ...]]:
        """What the console shows, as (name, *arguments): "start" with the steps first, then Console's methods."""
        while (event := await self._events.get()) is not None:
            yield event

    def _tell(self, event: tuple[Any, ...] | None) -> None:
        """Hand an event to the driver, in order, from any thread; None is the last."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def run(self, config: Config) -> bool:
        """The whole run; false when `stop` ended it early. Raises what ended it, if that is an error."""
        self._loop = asyncio.get_running_loop()
        logging.getLogger("jaxrl_ppo").addHandler(_Forward(self._tell))
        self._work = asyncio.create_task(self._prepare_and_fit(config))
        try:
            await self._work
        except asyncio.CancelledError:
            if not self._stop_asked:
                raise
            self._tell(("note", "stopped before the first step: the same command starts again"))
            return False
        finally:
            self._tell(None)
        return self._pipeline is None or self._pipeline.step == self._pipeline.total_steps

    async def stop(self) -> None:
        """End early: after the step under way, with a checkpoint; at once where no step has begun."""
        if self._stop_asked:
            return
        self._stop_asked = True
        if self._pipeline is not None and self._pipeline.begun:
            self._tell(("note", "asked to stop: the step under way is finished and saved; Ctrl-C now ends it unsaved"))
            self._pipeline.stop()
        elif self._work is not None:
            self._work.cancel()

    async def _prepare_and_fit(self, config: Config) -> None:
        async with AsyncExitStack() as stack:
            await self._run(config, stack)

    async def _run(self, config: Config, stack: AsyncExitStack) -> None:
        rollout = config.actor_rollout_ref.rollout
        rollout.name = resolve_engine_name(rollout.name)
        checkpoints = Checkpoints(
            Path(config.trainer.default_local_dir).absolute(),
            config.trainer.max_actor_ckpt_to_keep or KEPT_BY_DEFAULT,
            keep_critic=config.trainer.max_critic_ckpt_to_keep,
        )
        try:
            checkpoints.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"trainer.default_local_dir={checkpoints.root}: cannot be made: {error}") from error
        await stack.enter_async_context(run_lock(checkpoints.root))
        resumed = checkpoints.to_resume(config.trainer.resume_mode, config.trainer.resume_from_path)
        controller = Checkpoints.load(resumed) if resumed else None

        mapping = create_role_worker_mapping(config)
        pools = create_resource_pool_manager(config, mapping)
        pools.check(ray.nodes())

        # Everything that a user can get wrong comes before anything that takes long.
        await asyncio.to_thread(check_algorithms, config)
        model = config.actor_rollout_ref.model
        assert model.path is not None
        assert config.data.train_files is not None
        folder = await asyncio.to_thread(copy_to_local, model.path, key="actor_rollout_ref.model.path")
        critic_folder = None
        if Role.Critic in mapping:
            assert config.critic.model.path is not None  # filled in with the actor's
            key = "critic.model.path"
            critic_folder = str(await asyncio.to_thread(copy_to_local, config.critic.model.path, key=key))
        tokenizer = await asyncio.to_thread(
            hf_tokenizer,
            model.tokenizer_path or folder,
            trust_remote_code=model.trust_remote_code,
            custom_chat_template=model.custom_chat_template,
        )
        reward_model = judge_folder = None
        if judge_served(config):
            path, key = config.reward.reward_model.model_path, "reward.reward_model.model_path"
            assert path is not None
            judge_folder = str(await asyncio.to_thread(copy_to_local, path, key=key))
        elif Role.RewardModel in mapping:
            reward_model = await asyncio.to_thread(_reward_model_folder, config, tokenizer)
        processor = hf_processor(folder, trust_remote_code=model.trust_remote_code)
        agents = await asyncio.to_thread(create_agent_loops, rollout, config.data, tokenizer)
        stack.push_async_callback(agents.close)
        make_dataset = functools.partial(create_rl_dataset, tools=agents.tools.schemas if agents.tools else ())
        dataset = await asyncio.to_thread(make_dataset, config.data.train_files, config.data, tokenizer, processor)
        agents.check(sorted(dataset.agent_names or ()))
        prompts = PromptStream(
            dataset,
            create_rl_sampler(config.data, dataset),
            config.data.train_batch_size,
            read_ahead_threads=config.data.dataloader_num_workers,
        )
        stack.callback(prompts.close)
        validation: list[Prompt] = []
        if config.data.val_files:
            validating = await asyncio.to_thread(
                make_dataset, config.data.val_files, config.data, tokenizer, processor, is_train=False
            )
            validation = [validating[i] for i in range(len(validating))]
        total_steps = config.trainer.total_training_steps or prompts.steps_per_epoch * config.trainer.total_epochs
        step = controller["step"] if controller else 0
        self._tell(("start", {"total_steps": total_steps, "start_step": step}))
        if sizes.takes_turns(config) and (rollout.name, rollout.device) == ("vllm", "cpu"):
            self._tell(("note", "vLLM's build for CPUs frees nothing while it sleeps: its memory stays its own"))
        if resumed and (told := nothing_to_do(config.trainer, resumed, step, total_steps)):
            self._tell(("note", told))
            return
        made_of = await asyncio.to_thread(identity, folder, tokenizer)
        if controller:  # before anything is started: a checkpoint of another model or of other data is refused
            check_identity(controller["identity"], made_of)
            check_mode(controller, config, str(resumed))
            prompts.restore(controller["prompts"])
        rewards = RewardManager(config, tokenizer, judge_folder)
        stack.push_async_callback(rewards.close)
        await rewards.start(dataset.data_sources or ())

        checkpoints.sweep()
        observer = RunObserver(
            config.trainer,
            config=(resolved := dataclasses.asdict(config)),
            config_yaml=yaml.safe_dump(resolved, sort_keys=False),
            resume_step=step if controller else None,
            decode=tokenizer.decode,
            tell=self._tell,
        )
        rewards.report_faults(observer.fault)
        succeeded = False
        stack.callback(lambda: observer.finish(succeeded=succeeded))
        if resumed:
            self._tell(("note", f"going on after step {step}: {resumed}"))

        self._tell(("note", "starting the trainer and the rollout replicas; the first steps also compile"))
        pools.create(config.trainer.deadlines.start_s)
        stack.callback(pools.close)
        async with asyncio.TaskGroup() as starting:
            if judge_folder is not None:
                servers = mapping[Role.RewardModel]
                judges = JudgeGroup(config, pools, servers, model_folder=judge_folder, on_fault=observer.fault)
                rewards.judges = judges
                stack.push_async_callback(judges.close)
                starting.create_task(judges.start())
            workers = starting.create_task(
                self.init_workers(
                    config,
                    mapping,
                    pools,
                    model_folder=str(folder),
                    critic_folder=critic_folder,
                    reward_model_folder=reward_model[0] if reward_model else None,
                    total_steps=total_steps,
                    probe=list(dataset[0].token_ids),
                    on_fault=observer.fault,
                )
            )
        trainer, critic, scorer, rollouts = workers.result()
        stack.push_async_callback(trainer.stores.close)
        stack.push_async_callback(rollouts.close)
        if reward_model and scorer:
            rewards.model = RewardModel(scorer, reward_model[1])
        if resumed:
            await trainer.restore(resumed / "actor")
            if critic is not None:
                await critic.restore(checkpoints.critic(resumed))
        run = Run(
            config,
            trainer=trainer,
            critic=critic,
            rollouts=rollouts,
            rewards=rewards,
            prompts=prompts,
            agents=agents,
            validation_prompts=validation,
            total_steps=total_steps,
            devices=pools.devices,
            checkpoints=checkpoints,
            observer=observer,
            identity=made_of,
            contract=Contract(
                prompts=[dataset[i] for i in range(min(CONTRACT_PROMPTS, len(dataset)))],
                end_ids=load_decoder_config(folder).eos_token_ids,
                dtype=max(computed_in(config), key=lambda dtype: THRESHOLDS[dtype]),
                tolerance=rollout.log_prob_tolerance,
            ),
        )
        if controller:
            run.restore(controller)
        self._pipeline = run
        if self._stop_asked:
            run.stop()
        stack.push_async_callback(run.close)
        if config.trainer.val_only:
            await run.sync_weights()
            await run.validate(run.step)
        else:
            await self.fit(run)
        await run.close()  # the last checkpoint is part of the success
        succeeded = run.step == total_steps or config.trainer.val_only
        if not succeeded:
            kept = checkpoints.newest()
            where = f"saved in {checkpoints.folder(kept)}" if kept is not None else "nothing to save"
            self._tell(("note", f"stopped after step {run.step} of {total_steps}, {where}; the same command goes on"))

    async def init_workers(
        self,
        config: Config,
        mapping: dict[Role, Any],
        pools: ResourcePoolManager,
        *,
        model_folder: str,
        critic_folder: str | None,
        reward_model_folder: str | None,
        total_steps: int,
        probe: list[int],
        on_fault: OnFault,
    ) -> tuple[TrainerGroup, CriticGroup | None, RewardModelGroup | None, Router]:
        """Start the trainer pool and the replicas; a failure of either ends the start of the other.

        At the same time, unless they take turns on the same devices.

        `critic_folder` is the critic's model, `reward_model_folder` the reward model, None without one. `probe` are the
        tokens with which every weight load is checked; `on_fault` hears of what is lost and replaced.
        """
        stores = WeightStores(config.trainer.default_local_dir, config.trainer.deadlines.weights_s)
        rollouts = RolloutGroup(
            config, mapping[Role.Rollout], pools, model_folder=model_folder, stores=stores, on_fault=on_fault
        )
        weight_probe = WeightProbe(probe, computed_in(config), config.actor_rollout_ref.rollout.log_prob_tolerance)

        async def start_trainers() -> tuple[TrainerGroup, CriticGroup | None, RewardModelGroup | None]:
            workers = await Workers.start(config, mapping[Role.Actor], pools, Role.Actor)
            trainer = TrainerGroup(config, workers, weight_probe, stores, on_fault)
            steps = max(total_steps - config.trainer.critic_warmup, 1) * sizes.optimizer_steps_per_step(config)
            await trainer.load(model_folder, steps, needs_reference=Role.RefPolicy in mapping)
            scorer = None
            if reward_model_folder is not None:
                scorer = RewardModelGroup(
                    config,
                    pools,
                    mapping[Role.RewardModel],
                    model_folder=reward_model_folder,
                    trainers=workers,
                    on_fault=on_fault,
                )
                await scorer.start()
            if critic_folder is None:
                return trainer, None, scorer
            if pools.pool_of(Role.Critic) is not pools.pool_of(Role.Actor):
                workers = await Workers.start(config, mapping[Role.Critic], pools, Role.Critic)
            critic = CriticGroup(workers)
            await critic.load(critic_folder, total_steps * sizes.critic_steps_per_step(config))
            return trainer, critic, scorer

        if sizes.takes_turns(config):  # one after the other: an engine sizes its cache by the memory that is free
            trainer, critic, scorer = await start_trainers()
            shared = await trainer.workers.all("device_ids", "start_s", pools.pool_of(Role.Actor).resource)
            return trainer, critic, scorer, await rollouts.start(weight_probe.verify, shared)
        async with asyncio.TaskGroup() as starting:
            replicas = starting.create_task(rollouts.start(weight_probe.verify))
            trainers = starting.create_task(start_trainers())
        return *trainers.result(), replicas.result()


def _reward_model_folder(config: Config, policy: PreTrainedTokenizerBase) -> tuple[str, SequenceMaker]:
    """The reward model's folder on this node, and what makes its sequences."""
    settings = config.reward.reward_model
    assert settings.model_path is not None
    folder = copy_to_local(settings.model_path, key="reward.reward_model.model_path")
    trusted = config.actor_rollout_ref.model.trust_remote_code
    own = hf_tokenizer(folder, trust_remote_code=trusted, needs_template=False)
    return str(folder), SequenceMaker(policy, own, load_decoder_config(folder, "sequence").max_positions)


def computed_in(config: Config) -> set[str]:
    """The data types that the trainer and the rollouts compute in."""
    trainer = config.actor_rollout_ref.actor.fsdp_config.dtype
    return {DTYPE_NAMES.get(trainer, trainer), config.actor_rollout_ref.rollout.dtype}


class _Forward(logging.Handler):
    """Shows the package's warnings (a failed reward, a long wait, a replaced replica) where the person looks."""

    def __init__(self, tell: Callable[[tuple[Any, ...]], None]):
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(("warning", record.getMessage()))


class OneStepTaskRunner(TaskRunner):
    """One-step-off-policy PPO: the same run, its steps overlapped."""

    fit = staticmethod(one_step_off.fit)


class AsyncTaskRunner(TaskRunner):
    """Asynchronous PPO: the same run, generation going on all the time."""

    fit = staticmethod(asynchronous.fit)
