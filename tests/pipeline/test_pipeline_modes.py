"""The order of events in each mode, staleness, and exact resume: plain Python, no Ray, no engine, no clock."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_ppo.pipeline import one_step_off, sync
from jaxrl_ppo.pipeline.checkpoints import CheckpointError, Checkpoints
from jaxrl_ppo.pipeline.step import Run
from jaxrl_ppo.rollout.agent_loop import AgentLoops, SingleTurnLoop
from jaxrl_ppo.rollout.conversation import ChatFormat
from jaxrl_ppo.rollout.engine import Completion
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.records import Prompt
from jaxrl_ppo.weights.manifest import WeightManifest

PROMPTS_PER_STEP, SAMPLES = 3, 2
MODES = {"sync": sync.fit, "one_step_off": one_step_off.fit}


class World:
    """What the parts of one process share; `log` is everything that happened, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []


class Trainer:
    """A "policy" that is one number: a hash of everything it was trained on, in order."""

    def __init__(self, world: World):
        self.world, self.version, self.state = world, 0, 17

    async def log_probs(self, batch):
        self.world.log.append(("log_probs", self.version))
        return batch.rollout_log_probs

    async def update_actor(self, batch):
        self.world.log.append(("update begins", self.version))
        for _ in range(5):
            await asyncio.sleep(0)
        content = (batch.response_ids.tobytes(), batch.versions.tobytes(), batch.advantages.tobytes())
        self.state = hash((self.state, *content))
        self.version += 1
        self.world.log.append(("update ends", self.version))
        return {"actor/grad_norm": 1.0}

    async def stage_weights(self):
        return WeightManifest(self.version, "nowhere", {})

    async def save(self, folder: Path):
        folder.mkdir()
        (folder / "state").write_bytes(pickle.dumps((self.version, self.state)))

    async def wait_until_saved(self):
        await asyncio.sleep(0)

    def restore(self, folder: Path):
        self.version, self.state = pickle.loads((folder / "state").read_bytes())


class Rollouts:
    """Answers with tokens that are a function of the request's seed and of the weights' version."""

    def __init__(self, world: World):
        self.world, self.version = world, -1

    async def generate(self, requests):
        version = self.version
        self.world.log.append(("generation begins", requests[0].id, version))
        order = list(requests)
        random.Random(len(self.world.log)).shuffle(order)  # they finish in any order
        for request in order:
            await asyncio.sleep(0)
            rng = np.random.default_rng([request.seed, version])
            length = int(rng.integers(1, 9))
            yield Completion(
                request.id,
                rng.integers(0, 100, length).astype(np.int32),
                rng.normal(size=length).astype(np.float32),
                np.full(length, version, np.int32),
                "stop",
            )
        self.world.log.append(("generation ends", requests[0].id, version))

    async def sleep(self):
        self.version = -1
        self.world.log.append(("sleep",))

    async def load_weights(self, manifest):
        self.version = manifest.version
        self.world.log.append(("load", manifest.version))


class Rewards:
    """The sum of the tokens."""

    async def score(self, prompt, sample):
        await asyncio.sleep(0)
        sample.reward, sample.text = float(sample.response_ids.sum() % 7), "text"

    def batch_report(self, when):
        return {}


class Prompts:
    """Prompts 0, 1, 2, …"""

    def __init__(self) -> None:
        self.next = 0

    def take(self, count):
        batch = [make_prompt(self.next + i) for i in range(count)]
        self.next += count
        return batch

    def update(self, prompts, samples):
        pass

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]


class Observer:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.ordinals: dict[int, list[int]] = {}
        self.validations: list[tuple[int, int]] = []

    def span(self, name, *, track, step, **args):
        return contextlib.nullcontext()

    def event(self, name, start, end, *, track, step):
        pass

    def step(self, step, metrics):
        assert step not in self.steps
        self.steps[step] = dict(metrics)

    def validation(self, step, prompts, samples, metrics):
        self.validations.append((step, int(samples[0].versions[0])))

    def rollout(self, step, batch, samples):
        self.ordinals[step] = [sample.ordinal for sample in samples]

    def fault(self, name, message):
        raise AssertionError(message)

    def warn(self, message):
        raise AssertionError(message)


def make_prompt(ordinal: int) -> Prompt:
    return Prompt(ordinal, (1, 2, 3), [], "test", None, {})


def make_config(save_freq: int = -1, test_freq: int = -1) -> Config:
    config = Config()
    config.algorithm.adv_estimator = "grpo"
    config.algorithm.rollout_correction.bypass_mode = True
    config.data.train_batch_size = PROMPTS_PER_STEP
    config.actor_rollout_ref.rollout.n = SAMPLES
    config.actor_rollout_ref.rollout.response_length = 16
    config.trainer.save_freq, config.trainer.test_freq = save_freq, test_freq
    config.trainer.val_before_train = test_freq > 0
    return config


def make_run(root: Path, steps: int, **settings: int) -> tuple[Run, World, Observer]:
    world, observer = World(), Observer()
    run = Run(
        make_config(**settings),
        trainer=Trainer(world),
        rollouts=Rollouts(world),
        rewards=Rewards(),
        prompts=Prompts(),
        agents=AgentLoops({"single_turn_agent": SingleTurnLoop()}, "single_turn_agent", ChatFormat(None, {})),
        validation_prompts=[make_prompt(i) for i in range(2)],
        total_steps=steps,
        devices=1,
        checkpoints=Checkpoints(root, keep=None),
        observer=observer,
        identity={},
        contract=None,
    )
    return run, world, observer


async def finish(mode: str, run: Run) -> None:
    run.config.trainer.mode = mode
    await MODES[mode](run)
    await run.close()


async def test_sync_generates_each_batch_with_the_weights_it_trains(tmp_path):
    run, world, observer = make_run(tmp_path, 4)
    await finish("sync", run)
    versions = [event[2] for event in world.log if event[0] == "generation begins"]
    assert versions == [0, 1, 2, 3]
    assert [m["training/staleness"] for m in observer.steps.values()] == [0, 0, 0, 0]
    kinds = [event[0] for event in world.log if event[0] not in ("load", "sleep")]
    assert kinds == ["generation begins", "generation ends", "update begins", "update ends"] * 4


async def test_taking_turns_the_rollouts_sleep_while_the_trainer_works(tmp_path):
    run, world, observer = make_run(tmp_path / "turns", 3, test_freq=2)
    run.config.actor_rollout_ref.hybrid_engine = True
    await finish("sync", run)
    kinds = [event[0] for event in world.log]
    turn = ["generation begins", "generation ends", "sleep", "update begins", "update ends", "load"]
    checked = ["load", "generation begins", "generation ends"]  # a validation answers before the first turn
    validated = ["generation begins", "generation ends"]
    assert kinds == checked + turn + turn + validated + turn + validated

    apart, _, expected = make_run(tmp_path / "apart", 3, test_freq=2)
    apart.config.actor_rollout_ref.hybrid_engine = False
    await finish("sync", apart)
    assert run.trainer.state == apart.trainer.state
    assert observer.ordinals == expected.ordinals

    kept, world, _ = make_run(tmp_path / "kept", 2)
    kept.config.actor_rollout_ref.rollout.free_cache_engine = False
    await finish("sync", kept)
    assert "sleep" not in [event[0] for event in world.log]


async def test_one_step_off_generates_the_next_batch_during_the_update(tmp_path):
    run, world, observer = make_run(tmp_path, 4)
    await finish("one_step_off", run)
    versions = [event[2] for event in world.log if event[0] == "generation begins"]
    assert versions == [0, 0, 1, 2]  # batch 1 and 2 with the first weights, batch t + 1 with those of update t - 1
    assert [m["training/staleness"] for m in observer.steps.values()] == [0, 1, 1, 1]
    starts = [i for i, event in enumerate(world.log) if event[0] == "generation begins"]
    for step in (1, 2, 3):  # the generation of batch step + 1 starts before the update of `step` ends
        assert starts[step] < world.log.index(("update ends", step))


@pytest.mark.parametrize("mode", MODES)
async def test_weights_change_only_while_nothing_is_generated(tmp_path, mode):
    run, world, _ = make_run(tmp_path, 6, test_freq=2)
    await finish(mode, run)
    running = 0
    for event in world.log:
        running += {"generation begins": 1, "generation ends": -1}.get(event[0], 0)
        assert not (event[0] == "load" and running)


@pytest.mark.parametrize("mode", MODES)
async def test_validation_scores_the_weights_just_trained(tmp_path, mode):
    run, _, observer = make_run(tmp_path, 5, test_freq=2)
    await finish(mode, run)
    assert observer.validations == [(0, 0), (2, 2), (4, 4), (5, 5)]  # (step, version that answered)


@pytest.mark.parametrize("mode", MODES)
async def test_every_prompt_is_trained_once_and_in_order(tmp_path, mode):
    run, _, observer = make_run(tmp_path, 5)
    await finish(mode, run)
    ordinals = [ordinal for step in sorted(observer.ordinals) for ordinal in observer.ordinals[step]]
    assert ordinals == [i for i in range(5 * PROMPTS_PER_STEP) for _ in range(SAMPLES)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
async def test_resume_is_exact(tmp_path, mode, cut):
    whole, _, seen = make_run(tmp_path / "whole", 6, save_freq=1)
    await finish(mode, whole)

    root = tmp_path / "cut"
    first, _, _ = make_run(root, 6, save_freq=1)
    with contextlib.suppress(ZeroDivisionError):
        first.finish = lambda step, finish=first.finish: (finish(step), 1 / (step - cut))  # killed after step `cut`
        await finish(mode, first)
    with contextlib.suppress(asyncio.CancelledError):
        await first.saving.finish()

    folder = Checkpoints(root, keep=None).to_resume("auto", None)
    assert folder == root / f"global_step_{cut}"
    second, _, seen_again = make_run(root, 6, save_freq=1)
    second.trainer.restore(folder / "actor")
    second.prompts.restore(Checkpoints.load(folder)["prompts"])
    second.restore(Checkpoints.load(folder))
    await finish(mode, second)
    assert seen_again.ordinals == {step: seen.ordinals[step] for step in range(cut + 1, 7)}
    assert second.trainer.state == whole.trainer.state
    drop = ("timing", "perf")
    for step, metrics in seen_again.steps.items():
        same = {k: v for k, v in metrics.items() if not k.startswith(drop)}
        assert same == {k: v for k, v in seen.steps[step].items() if not k.startswith(drop)}


@pytest.mark.parametrize("mode", MODES)
async def test_a_stop_ends_after_the_step_with_a_checkpoint(tmp_path, mode):
    run, world, _ = make_run(tmp_path, 6)
    update = run.trainer.update_actor

    async def asked_to_stop(batch):
        if run.trainer.version == 2:
            run.stop()
        return await update(batch)

    run.trainer.update_actor = asked_to_stop
    await finish(mode, run)
    assert run.step == 3
    folder = run.saving.checkpoints.to_resume("auto", None)
    assert folder == tmp_path / "global_step_3"
    assert (Checkpoints.load(folder)["pending"] is None) == (mode == "sync")

    again, world, _ = make_run(tmp_path / "other", 6)
    again.stop()  # before the first step there is nothing to save
    await finish(mode, again)
    assert (again.step, again.saving.checkpoints.newest()) == (0, None)
    assert "update begins" not in [event[0] for event in world.log]


async def test_a_checkpoint_that_fails_ends_the_run_at_the_next_step(tmp_path):
    run, _, observer = make_run(tmp_path, 9, save_freq=3)
    wait = run.trainer.wait_until_saved

    async def full():
        await wait()
        if run.step >= 5:
            raise OSError("No space left on device")

    run.trainer.wait_until_saved = full
    with pytest.raises(CheckpointError, match=r"step 6 .*No space left.*the checkpoint of step 3 is untouched"):
        await finish("sync", run)
    assert 6 <= max(observer.steps) < 9


async def test_a_failed_reward_call_ends_the_run_with_its_cause(tmp_path):
    run, _, _ = make_run(tmp_path, 3)

    async def broken(prompt, sample):
        raise ValueError("the reward function is broken")

    run.rewards.score = broken
    with pytest.raises(BaseExceptionGroup, match="unhandled errors") as error:
        await sync.fit(run)
    assert "the reward function is broken" in str(error.value.exceptions[0])
