"""Tools of a user's file: their descriptions for the model, and their calls, each in a process that can be killed."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import multiprocessing
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from jaxrl_ppo.guard import guard_pool_process
from jaxrl_ppo.schema.config import MultiTurnConfig
from jaxrl_ppo.schema.hermes import ToolCall
from jaxrl_ppo.user_code import UserCodeError, load_file, load_name

KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"


@dataclasses.dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What the model is told. `failure` is the kind of failure: unknown, call, exception, timeout, crash; or None."""

    text: str
    failure: str | None = None


def load_tools(path: str) -> list[dict[str, Any]]:
    """JSON schemas of the functions that the Python file `path` defines, those whose names begin with _ left out.

    A function's type hints and its docstring (with an `Args:` section) make its schema. Raises UserCodeError for a
    file that cannot be loaded, that defines no function, or with a function that lacks hints or descriptions.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    module = load_file(path, KEY)
    functions = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    if not functions:
        raise UserCodeError(f"{KEY}: {path} defines no function; every public function of the file is a tool")
    schemas = []
    for function in functions:
        try:
            schemas.append(get_json_schema(function))
        except (DocstringParsingException, TypeHintParsingException) as error:
            line = inspect.getsourcelines(function)[1]
            raise UserCodeError(
                f"{KEY}: the tool {function.__name__} ({Path(path)}, line {line}) needs type hints, and a docstring "
                f"with an Args: section that describes every argument: {error}"
            ) from error
    return schemas


def configured_tools(multi_turn: MultiTurnConfig) -> list[dict[str, Any]]:
    """JSON schemas of the tools that prompts tell the model of; none where they are off. Raises as `load_tools`."""
    return load_tools(multi_turn.tool_config_path) if multi_turn.enable and multi_turn.tool_config_path else []


class Tools:
    """The tools of one file. Calls run in up to `workers` processes; one that takes longer than `timeout_s` seconds is
    ended with its process."""

    def __init__(self, path: str, *, workers: int, timeout_s: float):
        """Raises UserCodeError as `load_tools` does."""
        self.schemas = load_tools(path)
        self._path, self._timeout_s = path, timeout_s
        self._names = [schema["function"]["name"] for schema in self.schemas]
        # Spawned, since a forked child would inherit this process's locks as they are; started at the first call.
        self._pool = ProcessPool(workers, initializer=guard_pool_process, context=multiprocessing.get_context("spawn"))

    async def call(self, call: ToolCall) -> ToolAnswer:
        """Make one call. Whatever goes wrong is the answer, so that the model can learn from it."""
        if call.problem:
            return ToolAnswer(f"error: {call.problem}", "call")
        if call.name not in self._names:
            return ToolAnswer(f"error: no function {call.name!r}; there are: {', '.join(self._names)}", "unknown")
        future = self._pool.schedule(_run, args=(self._path, call.name, call.arguments), timeout=self._timeout_s)
        try:
            return await asyncio.wrap_future(future)
        except TimeoutError:
            return ToolAnswer(f"error: no answer within {self._timeout_s:g} s", "timeout")
        except ProcessExpired:
            return ToolAnswer("error: the tool crashed", "crash")

    async def close(self) -> None:
        """End the processes."""
        self._pool.stop()
        await asyncio.to_thread(self._pool.join)


def _run(path: str, name: str, arguments: dict[str, Any]) -> ToolAnswer:
    """A call, in its own process."""
    function = load_name(path, name, KEY)
    try:
        value = function(**arguments)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return ToolAnswer(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    except Exception as error:
        return ToolAnswer(f"error: {type(error).__name__}: {error}", "exception")
