"""Prompts without a signal are replaced at once, the batch does not depend on who finishes first, resume is exact."""

from __future__ import annotations

import asyncio
import contextlib
import random

import numpy as np
import pytest
from test_pipeline_modes import MODES, PROMPTS_PER_STEP, Prompts, finish, make_run

from jaxrl_ppo.pipeline.batching import RewardPartError, make_batch, make_requests, split_greedy
from jaxrl_ppo.pipeline.checkpoints import Checkpoints
from jaxrl_ppo.pipeline.dynamic_sampling import DynamicSampling, TooFewGroupsError
from jaxrl_ppo.rollout.engine import SamplingParams
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.records import Sample

N = 2


def make_config(size=4, gen=None, most=0, metric=None) -> Config:
    config = Config()
    config.actor_rollout_ref.rollout.n = N
    config.data.train_batch_size, config.data.gen_batch_size = size, gen
    settings = config.algorithm.filter_groups
    settings.enable, settings.max_num_gen_batches, settings.metric = True, most, metric
    return config


def with_signal(ordinal: int) -> bool:
    """About half of the prompts."""
    return ordinal % 5 in (1, 3, 4)


def sample_of(ordinal, index, parts=True):
    value = float(index) if with_signal(ordinal) else 1.0
    empty = np.zeros(0, np.float32)
    found = {"score": value, "acc": 1.0, "format": value} if parts else {}
    return Sample(ordinal, index, empty, empty, empty, empty, "stop", value, found)


async def fill(config, seed, slow=()):
    """Fill a batch with samples that finish in an order drawn from `seed`; prompts of `slow` finish last of all."""
    stream, order, log = Prompts(), random.Random(seed), []

    async def respond(prompts, scored):
        log.append([prompt.ordinal for prompt in prompts])
        waiting = [(prompt.ordinal, index) for prompt in prompts for index in range(N)]
        order.shuffle(waiting)

        async def one(ordinal, index):
            for _ in range(200 if ordinal in slow else order.randrange(20)):
                await asyncio.sleep(0)
            scored(sample_of(ordinal, index))

        await asyncio.gather(*(one(*key) for key in waiting))

    filled = await DynamicSampling(config, N).fill(stream.take(config.data.gen_batch_size or 4), stream.take, respond)
    return filled, stream, log


@pytest.mark.parametrize("gen", [None, 2, 9])
async def test_the_batch_and_what_it_drew_do_not_depend_on_the_order_of_completion(gen):
    results = [await fill(make_config(gen=gen), seed) for seed in range(8)]
    for filled, stream, _ in results:
        ordinals = [prompt.ordinal for prompt in filled.prompts]
        assert ordinals == [i for i in range(20) if with_signal(i)][:4] == [1, 3, 4, 6]
        assert sorted((s.ordinal, s.index) for s in filled.samples) == [(o, i) for o in ordinals for i in range(N)]
        assert stream.next == results[0][1].next
        assert filled.metrics["training/dropped_prompts"] == sum(not with_signal(i) for i in range(stream.next))
        assert filled.metrics["training/generated_prompts"] == stream.next


async def test_a_prompt_is_replaced_before_the_slowest_has_finished():
    _, _, log = await fill(make_config(), 0, slow=(1,))
    assert log[0] == [0, 1, 2, 3]
    assert sum(len(drawn) for drawn in log) == 7  # 0, 2 and then 5 replaced while prompt 1 was still running
    everything = [ordinal for drawn in log for ordinal in drawn]
    assert everything == sorted(everything)


async def test_the_metric_decides_and_a_missing_one_is_named():
    with pytest.raises(BaseExceptionGroup) as caught:
        await fill(make_config(metric="acc", most=3), 0)  # acc is 1 for all
    assert "of 12 prompts had samples that all score the same (acc)" in str(caught.value.exceptions[0])
    assert isinstance(caught.value.exceptions[0], TooFewGroupsError)
    filled, _, _ = await fill(make_config(metric="format"), 0)
    assert [prompt.ordinal for prompt in filled.prompts] == [1, 3, 4, 6]
    with pytest.raises(BaseExceptionGroup) as caught:
        await fill(make_config(metric="wrong"), 0)
    assert isinstance(caught.value.exceptions[0], RewardPartError)
    assert "has no such number; it has acc, format, score" in str(caught.value.exceptions[0])


def make_filtering_run(root, steps):
    run, world, observer = make_run(root, steps, save_freq=1)
    run.config.algorithm.filter_groups.enable = True

    async def coarse(prompt, sample):  # half of all groups score the same
        sample.reward, sample.text = float(sample.response_ids.sum() % 2), "text"

    run.rewards.score = coarse
    return run, world, observer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_resume_is_exact_while_prompts_are_replaced(tmp_path, mode, cut):
    whole, _, seen = make_filtering_run(tmp_path / "whole", 4)
    await finish(mode, whole)
    assert whole.prompts.next > 4 * PROMPTS_PER_STEP  # some were replaced
    for step in range(1, 5):
        assert len(set(seen.ordinals[step])) == PROMPTS_PER_STEP
        assert seen.steps[step]["actor/zero_signal_groups"] == 0

    root = tmp_path / "cut"
    first, _, _ = make_filtering_run(root, 4)
    with contextlib.suppress(ZeroDivisionError):
        first.finish = lambda step, finish=first.finish: (finish(step), 1 / (step - cut))  # killed after step `cut`
        await finish(mode, first)
    with contextlib.suppress(asyncio.CancelledError):
        await first.saving.finish()
    folder = Checkpoints(root, keep=None).to_resume("auto", None)
    second, _, seen_again = make_filtering_run(root, 4)
    second.trainer.restore(folder / "actor")
    controller = Checkpoints.load(folder)
    second.prompts.restore(controller["prompts"])
    second.restore(controller)
    await finish(mode, second)
    assert seen_again.ordinals == {step: seen.ordinals[step] for step in range(cut + 1, 5)}
    assert second.trainer.state == whole.trainer.state


@pytest.mark.parametrize("mode", MODES)
async def test_remax_generates_a_greedy_response_with_the_batch(tmp_path, mode):
    run, _, observer = make_run(tmp_path, 2)
    run.config.algorithm.adv_estimator = "remax"
    run.estimation = type(run.estimation)(run.config)
    run.generation.greedy = run.estimation.needs("greedy_scores")
    asked, generate = [], run.rollouts.generate

    def watch(requests):
        asked.extend(requests)
        return generate(requests)

    run.rollouts.generate = watch
    batches, train = [], run.trainer.update_actor

    async def keep(batch):
        batches.append(batch)
        return await train(batch)

    run.trainer.update_actor = keep
    await finish(mode, run)
    temperatures = [request.sampling.temperature for request in asked]
    assert temperatures == [1.0, 1.0, 0.0] * (2 * PROMPTS_PER_STEP)
    for batch in batches:
        assert len(batch.scores) == len(batch.greedy_scores) == 2 * PROMPTS_PER_STEP
        np.testing.assert_array_equal(batch.greedy_scores[::2], batch.greedy_scores[1::2])
        first = batch.response_mask.argmax(axis=1)
        expected = batch.scores - batch.greedy_scores
        np.testing.assert_allclose(batch.advantages[np.arange(len(first)), first], expected)
    assert all(len(set(ordinals)) == PROMPTS_PER_STEP for ordinals in observer.ordinals.values())


def test_greedy_requests_and_scores_are_kept_apart():
    prompts = Prompts().take(2)
    requests = make_requests(prompts, N, SamplingParams(max_new_tokens=4, temperature=0.7), seed=1, greedy=True)
    assert [request.id for request in requests] == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    samples = [sample_of(ordinal, index) for ordinal in (0, 1) for index in range(N + 1)]
    rows, greedy = split_greedy(samples, N)
    assert greedy == {0: 1.0, 1: 2.0}
    assert [sample.index for sample in rows] == [0, 1, 0, 1]
    assert make_batch(prompts, rows, 16, greedy).greedy_scores.tolist() == [1, 1, 2, 2]
    assert make_batch(prompts, rows, 16).greedy_scores is None
