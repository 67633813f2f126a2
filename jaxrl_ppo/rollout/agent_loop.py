"""Agent loops: from a prompt to a response of one or several turns. Ours, a user's, and what runs them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from jaxrl_ppo.rollout.conversation import ChatFormat, Conversation
from jaxrl_ppo.rollout.engine import Completion, Request
from jaxrl_ppo.rollout.tool_loop import ToolLoop
from jaxrl_ppo.rollout.tools import Tools
from jaxrl_ppo.rollout.turn_client import Generates, TurnClient
from jaxrl_ppo.schema.hermes import knows_tools
from jaxrl_ppo.user_code import UserCodeError, load_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jaxrl_ppo.schema.config import DataConfig, RolloutConfig
    from jaxrl_ppo.schema.records import Prompt

SINGLE_TURN, TOOL = "single_turn_agent", "tool_agent"
DEFAULT_KEY = "actor_rollout_ref.rollout.agent.default_agent_loop"
CONFIG_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


class AgentLoop(Protocol):
    """What turns a prompt into a response. One object serves all samples, concurrently, on one event loop.

    A user's is a class made with keyword arguments `tokenizer`, `config` (the RolloutConfig), `tools` (a Tools, or
    None) and whatever its entry in agent.agent_loop_config_path adds.
    """

    async def run(self, prompt: Prompt, conversation: Conversation) -> Completion:
        """Carry on `conversation`, which begins with the prompt's tokens; returns its `completion()`."""
        ...


class SingleTurnLoop:
    """One answer and nothing else."""

    async def run(self, prompt: Prompt, conversation: Conversation) -> Completion:
        """See AgentLoop."""
        await conversation.generate()
        return conversation.completion()


class AgentLoops:
    """Runs a loop for every request, many at a time."""

    def __init__(
        self,
        loops: Mapping[str, AgentLoop],
        default: str,
        chat: ChatFormat,
        *,
        tools: Tools | None = None,
        max_assistant_turns: int | None = None,
        max_user_turns: int | None = None,
    ):
        """`default` is the loop of prompts that name none."""
        self.loops, self.default, self.tools = loops, default, tools
        self._chat = chat
        self._limits = {"max_assistant_turns": max_assistant_turns, "max_user_turns": max_user_turns}

    def check(self, names: Sequence[str | None]) -> None:
        """Raise UserCodeError for a loop that a row names and that does not exist."""
        for name in names:
            if name is not None and name not in self.loops:
                raise UserCodeError(
                    f"a row's agent_name is {name!r}; the agent loops are: {', '.join(self.loops)} "
                    f"({CONFIG_KEY} registers more)"
                )

    async def generate(
        self,
        engine: Generates,
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
        outside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> AsyncIterator[Completion]:
        """Yield each response as it finishes; `prompts[i]` is that of `requests[i]`, a response's first turn.

        Whatever runs outside the engine (tools) is timed with `outside`: from the first of them that starts to the
        last that runs beside it. Raises what the engine and the loops do.
        """
        client, shared = TurnClient(engine), _Shared(outside)

        def run(request: Request, prompt: Prompt) -> asyncio.Task[Completion]:
            loop = self.loops[prompt.agent_name or self.default]
            conversation = Conversation(request, client.complete, self._chat, shared.span, **self._limits)
            return asyncio.ensure_future(loop.run(prompt, conversation))

        tasks = [run(*pair) for pair in zip(requests, prompts)]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()
            client.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """End the tools' processes."""
        if self.tools is not None:
            await self.tools.close()


class _Shared:
    """One span over everything that runs at the same time."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]):
        self._make, self._running = make, 0
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def span(self) -> Any:
        if self._running == 0:
            self._open.enter_context(self._make())
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._open.close()


def create_agent_loops(rollout: RolloutConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> AgentLoops:
    """The loops that the configuration names, and the tools they use.

    Raises UserCodeError for a user's file or class that is missing or broken.
    """
    multi_turn, agent = rollout.multi_turn, rollout.agent
    tools = None
    if multi_turn.enable and multi_turn.tool_config_path:
        tools = Tools(multi_turn.tool_config_path, workers=agent.num_workers, timeout_s=multi_turn.tool_timeout_s)
    loops: dict[str, AgentLoop] = {SINGLE_TURN: SingleTurnLoop()}
    if tools is not None:
        loops[TOOL] = ToolLoop(tools, multi_turn, template_knows_tools=knows_tools(tokenizer, tools.schemas))
    makes = _registered(agent.agent_loop_config_path) if agent.agent_loop_config_path else {}
    default = default_loop(rollout)
    if ".py:" in default:
        makes[default] = {"class": default}
    for name, entry in makes.items():
        key = DEFAULT_KEY if name == default and ".py:" in name else CONFIG_KEY
        loops[name] = _make(name, entry, key, {"tokenizer": tokenizer, "config": rollout, "tools": tools})
    if default not in loops:
        raise UserCodeError(f"{DEFAULT_KEY}={default}: there is no such loop; there are: {', '.join(loops)}")
    return AgentLoops(
        loops,
        default,
        ChatFormat(tokenizer, data.apply_chat_template_kwargs),
        tools=tools,
        max_assistant_turns=multi_turn.max_assistant_turns,
        max_user_turns=multi_turn.max_user_turns,
    )


def default_loop(rollout: RolloutConfig) -> str:
    """The loop of rows that name none: with tools switched on, the tool loop unless another is asked for."""
    default = rollout.agent.default_agent_loop
    with_tools = rollout.multi_turn.enable and rollout.multi_turn.tool_config_path
    return TOOL if with_tools and default == SINGLE_TURN else default


def _registered(path: str) -> dict[str, dict[str, Any]]:
    """The entries of a loop file by name: a YAML list of {name, class: file.py:Class, further arguments}."""
    file = Path(path).expanduser()
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserCodeError(f"{CONFIG_KEY}: {file} cannot be read: {error}") from error
    named = isinstance(entries, list) and all(isinstance(entry, dict) and "name" in entry for entry in entries)
    if not named or not all(".py:" in str(entry.get("class")) for entry in entries):
        raise UserCodeError(f"{CONFIG_KEY}: {file} must be a list of entries {{name: NAME, class: FILE.py:CLASS}}")
    return {str(entry["name"]): {k: v for k, v in entry.items() if k != "name"} for entry in entries}


def _make(name: str, entry: Mapping[str, Any], key: str, arguments: Mapping[str, Any]) -> AgentLoop:
    path, _, attribute = str(entry["class"]).rpartition(":")
    further = {key: value for key, value in entry.items() if key != "class"}
    make = load_name(path, attribute, key)
    try:
        loop = make(**arguments, **further)
    except TypeError as error:
        raise UserCodeError(
            f"{key}: {attribute} of {path} is made with {', '.join([*arguments, *further])}: {error}"
        ) from error
    if not callable(getattr(loop, "run", None)):
        raise UserCodeError(f"{key}: {attribute} of {path} needs a method run(prompt, conversation)")
    return loop
