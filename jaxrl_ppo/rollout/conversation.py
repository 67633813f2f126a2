"""A response that grows turn by turn: the policy's tokens as sampled, the environment's encoded once, none twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_ppo.rollout.engine import Completion, Request
from jaxrl_ppo.schema.records import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\u241e"  # stands for an answer in a rendered conversation; no template contains it


class ChatFormat:
    """What the chat template puts after an answer: its end, further messages, the beginning of the next answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_arguments: Mapping[str, Any]):
        self._tokenizer, self._arguments = tokenizer, dict(template_arguments)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text, special tokens included, since some models write tool calls with them."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def continuation(self, messages: Sequence[Mapping[str, Any]], last: int | None) -> list[int]:
        """Token ids that lead from an answer, whose last token is `last`, over `messages` to the next answer.

        Raises ValueError for a template that does not repeat an answer as it was given.
        """
        dialogue = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}, *map(dict, messages)]
        arguments = {**self._arguments, "add_generation_prompt": True, "tokenize": False}
        text = str(self._tokenizer.apply_chat_template(dialogue, **arguments))
        before, mark, after = text.partition(MARK)
        if not before or not mark or MARK in after:
            raise ValueError("the chat template changes the answers of earlier turns, so a conversation cannot grow")
        ids = self._tokenizer(after, add_special_tokens=False)["input_ids"]
        return ids[1:] if ids[:1] == [last] else ids  # the policy has ended its answer itself


class Conversation:
    """One sample in the making: what an agent loop works with.

    A loop calls `generate` for the policy's turns and `add` for everybody else's until it has enough or the
    conversation is `finished`, and returns `completion()`. `text` is the policy's latest turn.
    """

    def __init__(
        self,
        request: Request,
        complete: Callable[[Request], Awaitable[Completion]],
        chat: ChatFormat,
        outside: Callable[[], AbstractContextManager[None]],
        *,
        max_assistant_turns: int | None = None,
        max_user_turns: int | None = None,
    ):
        """`request` is that of the first turn; `outside` times what a loop does between two turns of the policy."""
        self._request, self._complete, self._chat = request, complete, chat
        self.outside = outside
        self._max_turns = {"assistant": max_assistant_turns, "tool": max_user_turns}
        self._ids: list[int] = []
        self._mask: list[float] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._turns: list[Turn] = []
        self._finish_reason = "stop"
        self._full = False
        self._latest: list[int] = []

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self._request.sampling.max_new_tokens - len(self._ids)

    @property
    def finished(self) -> bool:
        """Whether nothing may follow the policy's latest turn: no room is left, or a limit on turns is reached."""
        return self._full or self.room <= 0 or self._is_over("assistant") or self._is_over("tool")

    def _is_over(self, role: str) -> bool:
        limit = self._max_turns[role]
        return limit is not None and sum(turn.role == role for turn in self._turns) >= limit

    @property
    def text(self) -> str:
        """The policy's latest turn without its end token."""
        return self._chat.decode(self._latest)

    async def generate(self, max_new_tokens: int | None = None) -> None:
        """Let the policy write its next turn, of at most `max_new_tokens` if given. Raises what the engine does."""
        number = sum(turn.role == "assistant" for turn in self._turns)
        request = self._request
        most = self.room if max_new_tokens is None else min(max_new_tokens, self.room)
        request = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, max_new_tokens=most))
        if number:
            request = dataclasses.replace(
                request,
                id=f"{request.id}.{number}",
                prompt_ids=(*request.prompt_ids, *self._ids),
                seed=int(np.random.SeedSequence([request.seed, number]).generate_state(1)[0]),
            )
        completion = await self._complete(request)
        ids = completion.token_ids.tolist()
        self._append(ids, completion.log_probs.tolist(), completion.versions.tolist(), 1.0, Turn("assistant", 0, 0))
        self._finish_reason = completion.finish_reason
        self._latest = ids[:-1] if completion.finish_reason == "stop" else ids

    def add(self, messages: Sequence[Mapping[str, Any]], *, calls: Sequence[str] = (), failures: int = 0) -> bool:
        """Append `messages` of the environment and the beginning of the policy's next turn; not trained on.

        `calls` names the tools that answered, `failures` counts those that failed; both are for the record. Returns
        False, and the conversation is finished, where that leaves no room for an answer.
        """
        ids = self._chat.continuation(messages, self._ids[-1] if self._ids else None)
        if len(ids) >= self.room:
            self._finish_reason, self._full = "length", True
            return False
        version = self._versions[-1] if self._versions else 0
        turn = Turn("tool", 0, 0, tuple(calls), failures)
        self._append(ids, [0.0] * len(ids), [version] * len(ids), 0.0, turn)
        return True

    def _append(self, ids: list[int], log_probs: list[float], versions: list[int], mask: float, turn: Turn) -> None:
        start = len(self._ids)
        self._ids += ids
        self._log_probs += log_probs
        self._versions += versions
        self._mask += [mask] * len(ids)
        self._turns.append(dataclasses.replace(turn, start=start, end=len(self._ids)))

    def completion(self) -> Completion:
        """The whole response, of all turns."""
        return Completion(
            self._request.id,
            np.array(self._ids, np.int32),
            np.array(self._log_probs, np.float32),
            np.array(self._versions, np.int32),
            self._finish_reason,
            np.array(self._mask, np.float32),
            tuple(self._turns),
        )
