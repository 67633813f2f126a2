"""Reward managers: DAPO's overlong penalty, batches, a user's own."""

import asyncio

import numpy as np
import pytest
from test_reward_pool import make_prompt, score_all

from jaxrl_ppo.rewards import RewardError
from jaxrl_ppo.rewards.methods import overlong_penalty
from jaxrl_ppo.schema.config import (
    OverlongBufferConfig,
    RewardKwargsConfig,
    RewardManagerConfig,
    RewardManagerModuleConfig,
)


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0), (75, 0), (80, 0), (81, -0.1), (90, -1.0), (100, -2.0), (105, -2.5)]
)
def test_overlong_penalty(length, penalty):
    """Limit 100, buffer 20, factor 2: -(length - 80) / 20 * 2 above 80."""
    assert overlong_penalty(length, 100, 20, 2.0) == pytest.approx(penalty)


async def test_dapo_subtracts_the_penalty_and_keeps_the_score(started, tokenizer, function_file):
    path = function_file("""
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return {"score": 1.0, "acc": True} if extra_info else 1.0
    """)
    keys = {
        "reward_manager": RewardManagerConfig(name="dapo"),
        "reward_kwargs": RewardKwargsConfig(
            overlong_buffer_cfg=OverlongBufferConfig(enable=True, len=10, penalty_factor=0.5, log=True), max_resp_len=20
        ),
    }
    async with started(path, **keys) as manager:
        # the end token counts: lengths 6 and 16
        short, long = await score_all(manager, tokenizer, ["x" * 5, "x" * 15])
        assert (short.reward, long.reward) == (1.0, np.float32(1 - 6 / 10 * 0.5))
        assert short.reward_parts == {"score": 1.0, "overlong_reward": 0.0, "overlong": 0.0}
        assert long.reward_parts == {"score": 1.0, "overlong_reward": pytest.approx(-0.3), "overlong": 1.0}
        report = manager.batch_report("step 1")
        assert report["reward/overlong/mean"] == 0.5
        (with_acc,) = await score_all(manager, tokenizer, ["x" * 15], make_prompt(info={"a": 1}))
        assert with_acc.reward_parts["acc"] == 1.0
    keys["reward_kwargs"].overlong_buffer_cfg.enable = False
    async with started(path, **keys) as manager:
        (long,) = await score_all(manager, tokenizer, ["x" * 15])
        assert (long.reward, long.reward_parts) == (1.0, {})


BATCH = """
    import os
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
        if "raise" in solution_strs: raise ValueError("one of them")
        if "crash" in solution_strs: os._exit(1)
        if "short" in solution_strs: return []
        values = [None if text == "none" else scale * len(text) for text in solution_strs]
        return [{"score": v, "together": len(values)} if v is not None else None for v in values]
"""


async def test_batch_manager_gets_lists_and_a_fault_costs_one_sample(started, tokenizer, function_file):
    keys = {"reward_manager": RewardManagerConfig(name="batch"), "num_workers": 1}
    async with started(function_file(BATCH), arguments={"scale": 0.5}, **keys) as manager:
        samples = await score_all(manager, tokenizer, ["x" * n for n in range(30)])
        assert [sample.reward for sample in samples] == [n / 2 for n in range(30)]
        assert max(sample.reward_parts["together"] for sample in samples) > 1
        texts = ["aa", "raise", "bb", "none", "crash", "cc", "short"]
        samples = await score_all(manager, tokenizer, texts)
        assert [sample.reward for sample in samples] == [1, 0, 1, 0, 0, 1, 0]
        manager._max_failure_rate = 1.0
        report = manager.batch_report("step 1")
        assert report["reward/failures"] == 4
        assert report["reward/failures/type"] == 2
        assert {failed.text: failed.failure.kind for failed in manager.last_failures} == {
            "raise": "exception",
            "none": "type",
            "crash": "crash",
            "short": "type",
        }


async def test_batch_manager_with_our_scorers(started, tokenizer):
    async with started(reward_manager=RewardManagerConfig(name="batch")) as manager:
        samples = await score_all(manager, tokenizer, ["4", "5", "so 4"], make_prompt("arithmetic"))
        assert [sample.reward for sample in samples] == [1, 0, 1]


LISTS = """
    def length(data_sources, solution_strs, ground_truths, extra_infos):
        return [{"score": len(text), "together": len(solution_strs)} for text in solution_strs]
    def few(data_sources, solution_strs, ground_truths, extra_infos):
        return [1.0] * (0 if "few" in solution_strs else len(solution_strs))
    async def later(data_sources, solution_strs, ground_truths, extra_infos):
        return [1.0]
"""


async def test_several_weighted_functions_of_lists(started, tokenizer, function_file):
    path = function_file(LISTS)
    keys = {"reward_manager": RewardManagerConfig(name="batch"), "num_workers": 1}
    functions = {"right": {"weight": 2.0}, "length": {"path": path, "name": "length", "weight": -0.5}}
    functions["odd"] = {"path": path, "name": "few", "weight": 4.0}
    async with started(functions=functions, **keys) as manager:
        texts = ["4", "5", "so 4", "few", "44"]
        samples = await score_all(manager, tokenizer, texts, make_prompt("arithmetic"))
        right = [True, False, True, None, False]
        expected = [0 if r is None else 2 * r - len(text) / 2 + 4 for r, text in zip(right, texts)]
        assert [sample.reward for sample in samples] == expected
        parts = samples[2].reward_parts
        assert (parts["score"], parts["right"], parts["length"], parts["odd"]) == (4, 1, 4, 1)
        assert parts["length/together"] >= 1
        told = "type: reward.functions.odd: the reward function returned 0 results for 1 samples"
        assert samples[3].reward_labels["failure"] == told
    functions["odd"]["name"] = "later"
    with pytest.raises(
        RewardError, match=r"reward\.functions\.odd: with the batch manager it must be a plain function"
    ):
        async with started(functions=functions, **keys):
            pass


async def test_a_function_that_does_not_fit_the_batch_manager(started, function_file):
    keys = {"reward_manager": RewardManagerConfig(name="batch")}
    one = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1"
    with pytest.raises(RewardError, match="is called with the keyword arguments data_sources, solution_strs"):
        async with started(function_file(one), **keys):
            pass
    coroutine = "async def compute_score(data_sources, solution_strs, ground_truths, extra_infos): return [1]"
    with pytest.raises(RewardError, match="with the batch manager it must be a plain function, not async"):
        async with started(function_file(coroutine), **keys):
            pass


MANAGERS = """
    class Halving:
        def __init__(self, compute_score):
            self.compute_score = compute_score
        def score(self, response_length, **call):
            return {"score": self.compute_score(**call) / 2, "tokens": response_length}

    class Waiting(Halving):
        async def score(self, response_length, **call):
            import asyncio
            await asyncio.sleep(0.01)
            return self.compute_score(**call) + response_length

    class Unfinished:
        def __init__(self, compute_score): pass
"""


async def test_a_users_manager(started, tokenizer, function_file):
    function = function_file("def compute_score(data_source, solution_str, ground_truth, extra_info): return 3")
    file = function_file(MANAGERS, "managers.py")

    def keys(name):
        module = RewardManagerModuleConfig(path=file, name=name)
        return {"reward_manager": RewardManagerConfig(source="importlib", module=module)}

    async with started(function, **keys("Halving")) as manager:
        (sample,) = await score_all(manager, tokenizer, ["abc"])
        assert (sample.reward, sample.reward_parts) == (1.5, {"score": 1.5, "tokens": 4})
    async with started(function, **keys("Waiting")) as manager:
        samples = await asyncio.wait_for(score_all(manager, tokenizer, ["abc"] * 100), 60)
        assert {sample.reward for sample in samples} == {7}
    for name, message in (("Unfinished", "Unfinished in .* needs a method score"), ("None", "has no 'None'")):
        with pytest.raises(RewardError, match=message):
            async with started(function, **keys(name)):
                pass
