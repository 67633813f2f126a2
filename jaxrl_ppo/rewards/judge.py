"""What a reward function that asks a served judge gets besides: a server's address and the judge's tokenizer."""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxrl_ppo.rewards.results import Result

ADDRESS, TOKENIZER = "reward_router_address", "reward_model_tokenizer"  # verl's names
# Of the call under way. A manager of the user's stands between, and passes on what it was written to pass.
server_address: contextvars.ContextVar[str | None] = contextvars.ContextVar("server_address", default=None)


class JudgeServers(Protocol):
    """The judge's servers, as the run knows them."""

    async def ask(self, call: Callable[[str], Awaitable[Result]]) -> Result:
        """The result of `call`, which is given the address, host:port, of a server. Raises RewardError."""
        ...


class Judge:
    """In a reward process: gives functions the address and the tokenizer where they take them."""

    def __init__(self, folder: str):
        """`folder` holds the judge's model and tokenizer."""
        self._folder = folder
        self.asked = False  # whether a function takes the address

    def wanted(self, function: Any, given: Mapping[str, Any]) -> list[str]:
        """Which of the two `function` takes, and is not `given` by the configuration."""
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # no function; whoever loads it says so
            return []
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        names = [name for name in (ADDRESS, TOKENIZER) if name in parameters or (any_name and name == ADDRESS)]
        self.asked |= ADDRESS in names
        return [name for name in names if name not in given]

    def give(self, function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
        """`function` with the arguments `names` given to each call."""
        if TOKENIZER in names and Path(self._folder).is_dir():  # a dry run may only have a name
            _ = self._tokenizer  # here, since it would count in the first call's time

        def call(**arguments: Any) -> Any:
            if ADDRESS in names:
                arguments[ADDRESS] = server_address.get()
            if TOKENIZER in names:
                arguments[TOKENIZER] = self._tokenizer
            return function(**arguments)

        return call

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer  # takes seconds to import

        return AutoTokenizer.from_pretrained(self._folder)
