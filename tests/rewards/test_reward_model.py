"""The reward model's side of a reward: what it is shown, batches of what waits, its score beside the function's."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
from test_reward_pool import FAULTS, make_prompt, make_sample, score_all

from jaxrl_ppo.rewards import RewardError
from jaxrl_ppo.rewards.model import RewardModel, RewardModelLost, SequenceMaker
from jaxrl_ppo.schema.config import RewardModelConfig
from jaxrl_ppo.schema.records import Prompt, Turn

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"


class Lengths:
    """Scores a sequence by its length, and remembers what it was asked. `fails` are raised first, one a batch."""

    def __init__(self, *fails):
        self.batches, self.fails = [], list(fails)

    async def score(self, sequences):
        self.batches.append(sequences)
        await asyncio.sleep(0.01)
        if self.fails and (error := self.fails.pop(0)):
            raise error
        return np.array([len(tokens) for tokens in sequences], np.float32)


@pytest.fixture
def chatty(tokenizer):
    """A tokenizer of the policy's vocabulary with a chat template."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = TEMPLATE
    return own


def reward_model(tokenizer, scorer, own=None, longest=1000):
    return RewardModel(scorer, SequenceMaker(tokenizer, own or tokenizer, longest))


KEYS = {"reward_model": RewardModelConfig(enable=True, weight=0.5)}
FUNCTION = "def compute_score(data_source, solution_str, ground_truth, extra_info): return {'score': 2, 'acc': True}"


async def test_the_policys_own_tokens_are_scored_where_both_read_alike(started, tokenizer):
    scorer = Lengths()
    async with started(sources=["nobody scores these"], **KEYS) as manager:
        manager.model = reward_model(tokenizer, scorer)
        samples = await score_all(manager, tokenizer, ["abc", "", "defgh"])
        # prompt 2 tokens, response with its end token
        assert [sample.reward for sample in samples] == [3.0, 1.5, 4.0]
        assert [sample.reward_parts for sample in samples] == [{"reward_model": n} for n in (6, 3, 8)]
        sent = [tokens.tolist() for batch in scorer.batches for tokens in batch]
        assert [1, 2, *samples[0].response_ids.tolist()] in sent
        report = manager.batch_report("step 1")
        assert report["reward/reward_model/mean"] == pytest.approx(17 / 3)
        assert report["reward/failures"] == 0


def test_another_template_is_filled_with_text(tokenizer, chatty):
    maker = SequenceMaker(tokenizer, chatty, 1000)
    sample = make_sample(tokenizer, "two turns")
    sample.text = "two turns"
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    prompt = Prompt(0, (1, 2), chat, "mine", None, {})
    assert tokenizer.decode(maker.tokens(prompt, sample, [])) == "<system>S;<user>Q;<assistant>two turns;"
    turns = [{"role": "assistant", "text": "A"}, {"role": "tool", "text": "T"}, {"role": "assistant", "text": "B"}]
    text = "<system>S;<user>Q;<assistant>A;<tool>T;<assistant>B;"
    assert tokenizer.decode(maker.tokens(prompt, sample, turns)) == text
    other = copy.deepcopy(tokenizer)
    other.add_tokens("<new>")
    with pytest.raises(ValueError, match="its tokenizer is not the policy's and has no chat template"):
        SequenceMaker(chatty, other, 1000)


async def test_weighted_beside_a_function_and_among_several(started, tokenizer, function_file):
    path = function_file(FUNCTION)
    async with started(path, **KEYS) as manager:
        manager.model = reward_model(tokenizer, Lengths())
        (sample,) = await score_all(manager, tokenizer, ["abc"])
        assert sample.reward == 2 + 0.5 * 6
        assert sample.reward_parts == {"score": 5.0, "acc": 1.0, "reward_model": 6.0, "compute_score": 2.0}
    functions = {"rule": {"path": path, "weight": 3.0}, "sums": {"weight": 1.0}}
    async with started(functions=functions, **KEYS) as manager:
        manager.model = reward_model(tokenizer, Lengths())
        (sample,) = await score_all(manager, tokenizer, ["4"], make_prompt("arithmetic"))
        assert sample.reward == 3 * 2 + 1 + 0.5 * 4
        parts = {"score": 9.0, "rule": 2.0, "rule/acc": 1.0, "acc": 1.0, "sums": 1.0, "reward_model": 4.0}
        assert sample.reward_parts == parts


async def test_what_waits_is_one_batch(started, tokenizer):
    scorer = Lengths()
    model = reward_model(tokenizer, scorer)
    samples = [make_sample(tokenizer, "x" * n) for n in range(300)]
    results = await asyncio.gather(*(model.score(make_prompt(), sample, []) for sample in samples))
    assert [result.reward for result in results] == [n + 3 for n in range(300)]
    assert [len(batch) for batch in scorer.batches] == [256, 44]


async def test_a_sample_without_a_score_is_that_samples_failure(started, tokenizer, function_file):
    async with started(function_file(FAULTS), max_failure_rate=1.0, **KEYS) as manager:
        manager.model = reward_model(tokenizer, Lengths(), longest=20)
        samples = await score_all(manager, tokenizer, ["good", "x" * 30, "raise"])
        assert [sample.reward for sample in samples] == [1 + 0.5 * 7, 0, 0]
        messages = [sample.reward_labels.get("failure", "") for sample in samples]
        assert "33 tokens of prompt and response; the reward model takes 20" in messages[1]
        assert "no such thing" in messages[2]
        assert manager.batch_report("step 1")["reward/failures"] == 2
        manager.model = reward_model(tokenizer, Lengths(RewardModelLost("it died, twice")))
        samples = await score_all(manager, tokenizer, ["good", "good"])
        assert [s.reward_labels.get("failure") for s in samples] == ["crash: it died, twice"] * 2
        (sample,) = await score_all(manager, tokenizer, ["good"])
        assert sample.reward == 1 + 0.5 * 7
        manager.model = reward_model(tokenizer, type("NaN", (), {"score": not_a_number})())
        (sample,) = await score_all(manager, tokenizer, ["good"])
        assert sample.reward_labels["failure"] == "nan: the reward model's score is nan"
        manager.model = reward_model(tokenizer, Lengths(RewardError("it cannot be started again")))
        with pytest.raises(RewardError, match="started again"):
            await score_all(manager, tokenizer, ["good"])


async def not_a_number(self, sequences):
    return np.full(len(sequences), np.nan, np.float32)


async def test_turns_reach_the_model(started, tokenizer, chatty):
    async with started(**KEYS) as manager:
        scorer = Lengths()
        manager.model = reward_model(tokenizer, scorer, chatty)
        sample = make_sample(tokenizer, "abcd")
        sample.turns = (Turn("assistant", 0, 2), Turn("tool", 2, 3), Turn("assistant", 3, 5))
        await manager.score(make_prompt(), sample)
        text = tokenizer.decode(scorer.batches[0][0])
        assert text == "<user>?;<assistant>ab;<tool>c;<assistant>d;"
