"""Asynchronous mode: equal to the other two at its ends, never past its staleness limit, no prompt lost or repeated."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import selectors
from pathlib import Path

import numpy as np
import pytest
from test_pipeline_modes import PROMPTS_PER_STEP, SAMPLES, Rollouts, finish, make_prompt, make_run

from jaxrl_ppo.pipeline import asynchronous
from jaxrl_ppo.pipeline.backlog import Backlog, Group
from jaxrl_ppo.pipeline.checkpoints import CheckpointError, Checkpoints
from jaxrl_ppo.pipeline.queue import RolloutQueue
from jaxrl_ppo.pipeline.step import Run, StalenessError
from jaxrl_ppo.rollout.engine import Completion


def make_async(root: Path, steps: int, staleness: int, *, partial=True, rate=0.0, trigger=1, **settings):
    run, world, observer = make_run(root, steps, **settings)
    config = run.config
    config.trainer.mode = "async"
    config.async_training.max_staleness = staleness
    config.async_training.partial_rollout = partial
    config.async_training.trigger_parameter_sync_step = trigger
    config.actor_rollout_ref.rollout.over_sample_rate = rate
    return run, world, observer


async def finish_async(run: Run) -> None:
    await asynchronous.fit(run)
    await run.close()


def without_times(steps):
    drop = ("timing", "perf", "async")
    return {step: {k: v for k, v in row.items() if not k.startswith(drop)} for step, row in steps.items()}


@pytest.mark.parametrize(
    ("mode", "staleness", "partial"), [("sync", 0, True), ("sync", 0, False), ("one_step_off", 1, False)]
)
async def test_at_its_ends_it_equals_the_other_modes(tmp_path, mode, staleness, partial):
    other, _, expected = make_run(tmp_path / "other", 6, test_freq=2, save_freq=3)
    await finish(mode, other)
    run, _, seen = make_async(tmp_path / "async", 6, staleness, partial=partial, test_freq=2, save_freq=3)
    await finish_async(run)
    assert run.trainer.state == other.trainer.state
    assert seen.ordinals == expected.ordinals
    assert seen.validations == expected.validations
    assert without_times(seen.steps) == without_times(expected.steps)


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while everybody waits, and then at once."""

    def __init__(self) -> None:
        self.now = 0.0
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout=None):
                ready = super().select(0 if timeout else timeout)
                if not ready and timeout:
                    loop.now += timeout
                return ready

        super().__init__(Selector())

    def time(self) -> float:
        return self.now


class SlowRollouts(Rollouts):
    """Writes a token now and then, with the weights of that moment; how long a response takes has a long tail."""

    rng = random.Random(7)

    async def generate(self, requests):
        results: asyncio.Queue[Completion] = asyncio.Queue()

        async def respond(request):
            versions = []
            for _ in range(1 + int(self.rng.paretovariate(1.1)) % 16):
                await asyncio.sleep(self.rng.expovariate(2.0))
                versions.append(self.version)
            tokens = np.arange(len(versions), dtype=np.int32)
            log_probs = np.zeros(len(versions), np.float32)
            results.put_nowait(Completion(request.id, tokens, log_probs, np.array(versions, np.int32), "stop"))

        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(respond(request))
            for _ in requests:
                yield await results.get()


@pytest.mark.parametrize(
    ("staleness", "rate", "trigger", "partial"),
    [(0, 0, 1, True), (1, 1, 1, True), (4, 4, 2, True), (4, 1.5, 5, True), (2, 2, 1, False)],
)
def test_staleness_never_exceeds_its_limit(tmp_path, monkeypatch, staleness, rate, trigger, partial):
    """200 steps with random generation and training times."""
    loop = VirtualClock()
    histogram: collections.Counter[int] = collections.Counter()
    carried, mixed = 0, 0

    async def main():
        nonlocal carried, mixed
        run, world, observer = make_async(
            tmp_path, 200, staleness, rate=rate, trigger=trigger, partial=partial, test_freq=50
        )
        run.rollouts = run.generation.rollouts = SlowRollouts(world)
        run.estimation.estimate = lambda batch, samples: {}
        train = run.train

        async def trained(step, generated):
            nonlocal carried, mixed
            for sample in generated.samples:
                histogram[step - 1 - int(sample.versions.min())] += 1
                mixed += len(set(sample.versions.tolist())) > 1
            carried += generated.metrics["async/carried_over"] > 0
            await asyncio.sleep(run.rollouts.rng.expovariate(0.3))
            generated.batch.advantages = generated.batch.response_mask
            await train(step, generated)

        async def directly(function, *arguments):
            return function(*arguments)

        run.train = trained
        monkeypatch.setattr(asyncio, "to_thread", directly)
        await finish_async(run)
        return observer

    observer = loop.run_until_complete(main())
    loop.close()
    assert min(histogram) >= 0
    assert max(histogram) == staleness
    counts = collections.Counter(ordinal for step in observer.ordinals.values() for ordinal in step)
    assert set(counts.values()) == {SAMPLES}
    assert sorted(counts) == list(range(200 * PROMPTS_PER_STEP))
    assert not mixed or (partial and staleness)
    assert mixed or trigger > 1 or not (partial and staleness)
    assert (carried > 0) == (rate > 0)


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("cut", [1, 4])
async def test_after_a_crash_no_prompt_is_lost_or_trained_twice(tmp_path, partial, cut):
    first, _, seen = make_async(tmp_path, 7, 4, rate=2, partial=partial, save_freq=1)
    with contextlib.suppress(ZeroDivisionError):
        first.finish = lambda step, finish=first.finish: (finish(step), 1 / (step - cut))  # killed after step `cut`
        await finish_async(first)
    with contextlib.suppress(asyncio.CancelledError):
        await first.saving.finish()
    for task in list(first._background):
        task.cancel()
    folder = Checkpoints(tmp_path, keep=None).to_resume("auto", None)
    saved = Checkpoints.load(folder)
    second, _, again = make_async(tmp_path, 7, 4, rate=2, partial=partial, save_freq=1)
    second.trainer.restore(folder / "actor")
    second.prompts.restore(saved["prompts"])
    second.restore(saved)
    await finish_async(second)
    trained = [seen.ordinals[step] for step in range(1, saved["step"] + 1)] + list(again.ordinals.values())
    counts = collections.Counter(ordinal for step in trained for ordinal in step)
    assert counts == dict.fromkeys(range(7 * PROMPTS_PER_STEP), SAMPLES)

    third, _, _ = make_async(tmp_path, 7, 0, save_freq=1)
    third.restore(saved)
    if len(saved["pending"]) > PROMPTS_PER_STEP:
        third._loaded_version, third._step_of_version = 0, {0: 0}
        with pytest.raises(CheckpointError, match="max_staleness=0"):
            RolloutQueue(third)


async def test_a_sample_past_the_limit_ends_the_run(tmp_path):
    run, _, _ = make_async(tmp_path, 4, 1, rate=1)
    staleness = run._staleness
    run._staleness = lambda step, samples: staleness(step + 2, samples)
    with pytest.raises(StalenessError, match="allows 0 to 1"):
        await finish_async(run)
    await run.close()


async def test_what_goes_wrong_in_the_rollouts_ends_the_run(tmp_path):
    run, _, _ = make_async(tmp_path, 4, 2, rate=2)

    async def broken(prompt, sample):
        raise ValueError("the reward function is broken")

    run.rewards.score = broken
    with pytest.raises(BaseExceptionGroup, match="unhandled errors") as error:
        await finish_async(run)
    assert "the reward function is broken" in str(error.value.exceptions[0])


def test_a_straggler_is_carried_over_as_long_as_the_limit_lets_it():
    backlog = Backlog(batch_size=2, capacity=6, max_staleness=2, next_step=1, total_steps=9)
    assert backlog.room(0) == 6
    groups = [Group(make_prompt(i), 1, 0) for i in range(6)]
    backlog.add(groups)
    for group in groups[1:]:
        group.samples.append(object())
    assert [group.prompt.ordinal for group in backlog.take()] == [1, 2]
    assert backlog.room(0) == 0  # all of steps 2 and 3 is spoken for
    assert backlog.room(1) == 2
    backlog.add([late := Group(make_prompt(6), 1, 1), Group(make_prompt(7), 1, 1)])
    late.samples.append(object())
    assert [group.prompt.ordinal for group in backlog.take()] == [3, 4]
    assert backlog.take() is None  # step 3 is the last that prompt 0 may be in
    groups[0].samples.append(object())
    assert [group.prompt.ordinal for group in backlog.take()] == [0, 5]
