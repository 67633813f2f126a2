"""The reward model's side of a reward: samples as token sequences for it, scored as they come, in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jaxrl_ppo.rewards.results import Result, WrongResult, failed, from_exception, interpret

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from jaxrl_ppo.schema.records import Prompt, Sample

PART = "reward_model"  # the name of its score among a reward's parts
IN_A_BATCH = 256  # sequences sent to it at a time, so that others need not wait for all of a large batch


class RewardModelLost(RuntimeError):
    """The reward model's processes failed on a batch, and again after a fresh start."""


class Scorer(Protocol):
    """The reward model behind its processes."""

    async def score(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """The score of each int32 token sequence, float32 [N]. Raises RewardModelLost."""
        ...


class SequenceMaker:
    """Turns prompt and response into the tokens that the reward model sees.

    Where its tokenizer and chat template are the policy's, these are the policy's own tokens. Else they are decoded and
    put into the reward model's template, a turn of an agent loop a message.
    """

    def __init__(self, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, longest: int):
        """`longest` is what the reward model has positions for. Raises ValueError when it has no way to read a chat."""
        same_tokens = policy.get_vocab() == own.get_vocab()
        template = own.chat_template
        self.same = same_tokens and template in (None, policy.chat_template)
        if not self.same and template is None:
            raise ValueError(
                "reward.reward_model.model_path: its tokenizer is not the policy's and has no chat template; save one "
                "with it (tokenizer.chat_template)"
            )
        self.own, self.longest = own, longest

    def tokens(self, prompt: Prompt, sample: Sample, turns: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """The sequence to score, int32. `turns` are the response's {role, text}. Raises ValueError when it is longer
        than the model has positions for."""
        import numpy as np  # not above: reward processes, which do without it, import this package

        if self.same:
            tokens = np.concatenate([np.array(prompt.token_ids, np.int32), sample.response_ids])
        else:
            response = [{"role": turn["role"], "content": turn["text"]} for turn in turns]
            chat = [*prompt.messages, *(response or [{"role": "assistant", "content": sample.text or ""}])]
            tokens = np.array(self.own.apply_chat_template(chat, return_dict=False), np.int32)
        if len(tokens) > self.longest:
            raise ValueError(f"{len(tokens)} tokens of prompt and response; the reward model takes {self.longest}")
        return tokens.astype(np.int32)


class RewardModel:
    """Scores samples one by one; what waits while one batch is at the model makes the next. One event loop only."""

    def __init__(self, scorer: Scorer, sequences: SequenceMaker):
        self._scorer, self._sequences = scorer, sequences
        self._waiting: list[tuple[np.ndarray, asyncio.Future[float]]] = []
        self._work: asyncio.Task[None] | None = None

    async def score(self, prompt: Prompt, sample: Sample, turns: Sequence[Mapping[str, Any]]) -> Result:
        """The model's score of a sample whose `text` is known, as a reward; what goes wrong is the result's failure.

        Raises RewardError when the model cannot be started any more.
        """
        try:
            tokens = self._sequences.tokens(prompt, sample, turns)
        except Exception as error:  # a template may raise anything
            return from_exception(error)
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, answer))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._score_waiting())
        try:
            return interpret(await answer)
        except WrongResult:
            return failed("nan", f"the reward model's score is {answer.result()}")
        except RewardModelLost as error:
            return failed("crash", str(error))

    async def close(self) -> None:
        """Ask for nothing more."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def _score_waiting(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:IN_A_BATCH], self._waiting[IN_A_BATCH:]
            scores: Any
            try:
                scores = await self._scorer.score([tokens for tokens, _ in batch])
            except asyncio.CancelledError:
                for _, answer in batch:
                    answer.cancel()
                raise
            except Exception as error:
                scores = [error] * len(batch)
            for (_, answer), score in zip(batch, scores, strict=True):
                if answer.done():  # nobody waits for it any more
                    continue
                if isinstance(score, Exception):
                    answer.set_exception(score)
                else:
                    answer.set_result(float(score))


def add_score(rule: Result, model: Result, weight: float, part: str | None) -> Result:
    """The reward function's result and `weight` times the model's score, as one reward; either one's failure is its.

    `part` is what the function's value is called among the parts; None: it is none of them.
    """
    if rule.failure or model.failure:
        return Result(0.0, failure=rule.failure or model.failure)
    added = weight * model.reward
    parts = {**rule.parts, PART: model.reward}
    if part is not None:
        parts.setdefault(part, rule.reward)
    if "score" in rule.parts:
        parts["score"] = interpret(rule.parts["score"] + added).reward
    return Result(interpret(rule.reward + added).reward, parts, rule.labels)
