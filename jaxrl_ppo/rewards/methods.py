"""Reward managers as they run in a worker process: from one sample to its reward by way of the reward function."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl_ppo.rewards import math_answers  # noqa: F401 - registers its scorers
from jaxrl_ppo.rewards.results import Result, WrongResult, interpret
from jaxrl_ppo.rewards.scorers import score_by_source
from jaxrl_ppo.schema.user_code import UserCodeError, load_name

FUNCTION_KEY = "reward.custom_reward_function"
MANAGER_KEY = "reward.reward_manager"

# What a reward function is called with, by keyword; the batch manager's gets lists.
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = tuple(f"{name}s" for name in ARGUMENTS)


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """How rewards are computed; plain data that a worker process gets."""

    function_path: str | None = None
    function_name: str = "compute_score"
    function_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    manager: str = "naive"
    manager_path: str | None = None
    manager_name: str | None = None
    overlong_buffer: int = 0  # tokens; 0: no overlong penalty
    overlong_factor: float = 1.0
    log_overlong: bool = False
    max_response_length: int = 0


@dataclasses.dataclass(frozen=True)
class Call:
    """One sample to be scored."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    response_length: int


class Method:
    """The reward function with the manager around it.

    `mode` says how calls are made: `single`, one after the other; `concurrent`, coroutines at the same time;
    `batch`, as many as are waiting in one call of lists.
    """

    def __init__(self, spec: MethodSpec):
        """Load the user's code. Raises UserCodeError when it is missing, broken or of the wrong signature."""
        self._spec = spec
        arguments = BATCH_ARGUMENTS if spec.manager == "batch" else ARGUMENTS
        function, is_coroutine = _load_function(spec, arguments)
        self._score: Callable[..., Any]
        if spec.manager_path:
            make = load_name(spec.manager_path, spec.manager_name or "", MANAGER_KEY)
            manager = make(compute_score=function)
            if not callable(getattr(manager, "score", None)):
                raise UserCodeError(f"{MANAGER_KEY}: {spec.manager_name} in {spec.manager_path} needs a method score")
            _check_signature(manager.score, [*ARGUMENTS, "response_length"], {}, spec.manager_path, MANAGER_KEY)
            self._score = manager.score
            is_coroutine = inspect.iscoroutinefunction(manager.score)
        else:
            self._score = lambda response_length, **call: function(**call)
        self.mode = "concurrent" if is_coroutine else "single"
        if spec.manager == "batch":
            if is_coroutine:
                raise UserCodeError(f"{FUNCTION_KEY}: with the batch manager it must be a plain function, not async")
            self.mode = "batch"
            self._score_batch = function

    def start(self, call: Call) -> Any | Awaitable[Any]:
        """Call the user's code: its value, or an awaitable of it."""
        return self._score(**{field.name: getattr(call, field.name) for field in dataclasses.fields(call)})

    def start_batch(self, calls: Sequence[Call]) -> list[Any]:
        """Call the user's code with lists: one value for each call. Raises WrongResult for another number of them."""
        columns = {f"{name}s": [getattr(call, name) for call in calls] for name in ARGUMENTS}
        values = list(self._score_batch(**columns))
        if len(values) != len(calls):
            raise WrongResult("type", f"the reward function returned {len(values)} results for {len(calls)} samples")
        return values

    def finish(self, value: Any, call: Call) -> Result:
        """The reward from the value. Raises WrongResult when it is none."""
        result = interpret(value)
        if self._spec.manager != "dapo" or not self._spec.overlong_buffer:
            return result
        penalty = overlong_penalty(
            call.response_length,
            self._spec.max_response_length,
            self._spec.overlong_buffer,
            self._spec.overlong_factor,
        )
        parts = {"score": result.reward, **result.parts}
        if self._spec.log_overlong:
            parts |= {"overlong_reward": penalty, "overlong": float(penalty < 0)}
        return Result(interpret(result.reward + penalty).reward, parts, result.labels)


def overlong_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to limit - buffer, then down to -factor."""
    return min(-(length - (limit - buffer)) / buffer * factor, 0.0)


def _load_function(spec: MethodSpec, names: Sequence[str]) -> tuple[Callable[..., Any], bool]:
    """The reward function with its configured arguments, and whether it is a coroutine function.

    `names` are the arguments that it will be called with.
    """
    if spec.function_path is None:
        function = _score_each_by_source if spec.manager == "batch" else score_by_source
    else:
        function = load_name(spec.function_path, spec.function_name, FUNCTION_KEY)
        _check_signature(function, names, spec.function_arguments, spec.function_path, FUNCTION_KEY)
    return functools.partial(function, **spec.function_arguments), inspect.iscoroutinefunction(function)


def _score_each_by_source(**columns: Any) -> list[Any]:
    rows = zip(*(columns.pop(name) for name in BATCH_ARGUMENTS))
    return [score_by_source(*row, **columns) for row in rows]


def _check_signature(function: Any, names: Sequence[str], arguments: dict[str, Any], path: str, key: str) -> None:
    if not callable(function):
        raise UserCodeError(f"{key}: {path} defines it as a {type(function).__name__}, not a function")
    try:
        signature = inspect.signature(function)
        signature.bind(**dict.fromkeys(names), **arguments)
    except TypeError as error:
        line = f", line {inspect.getsourcelines(function)[1]}" if inspect.isroutine(function) else ""
        raise UserCodeError(
            f"{key}: {getattr(function, '__name__', function)}{signature} is called with the keyword arguments "
            f"{', '.join([*names, *arguments])}: {error} ({Path(path).expanduser().resolve()}{line})"
        ) from error
