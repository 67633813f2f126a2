"""Reward managers as they run in a worker process: from one sample to its reward by way of the reward function."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jaxrl_ppo.rewards.code import CodeRunner
from jaxrl_ppo.rewards.functions import (
    ARGUMENTS,
    BATCH_ARGUMENTS,
    FunctionSpec,
    check_signature,
    each_of,
    load_function,
    load_weighted,
)
from jaxrl_ppo.rewards.judge import ADDRESS, Judge, server_address
from jaxrl_ppo.rewards.results import Result, interpret
from jaxrl_ppo.user_code import UserCodeError, load_name

MANAGER_KEY = "reward.reward_manager"


@dataclasses.dataclass(frozen=True)
class MethodSpec:
    """How rewards are computed; plain data that a worker process gets. With `functions`, `function` is not used."""

    function: FunctionSpec = dataclasses.field(default_factory=FunctionSpec)
    functions: dict[str, FunctionSpec] = dataclasses.field(default_factory=dict)  # by the name of the part
    by_rule: bool = True  # False: no function scores, since a reward model is the whole reward
    runner: CodeRunner = dataclasses.field(default_factory=CodeRunner)
    judge_folder: str | None = None  # of a judge that is served for the functions to ask
    manager: str = "naive"
    manager_path: str | None = None
    manager_name: str | None = None
    overlong_buffer: int = 0  # tokens; 0: no overlong penalty
    overlong_factor: float = 1.0
    log_overlong: bool = False
    max_response_length: int = 0

    @property
    def code(self) -> str:
        """What is called, by name and, where it is a user's, by key and file."""
        if self.manager_path:
            return f"{self.manager_name} of {self.manager_path} ({MANAGER_KEY})"
        functions = list(self.functions.values()) or [self.function] * self.by_rule
        return " and ".join(map(str, functions)) or "no reward function"


@dataclasses.dataclass(frozen=True)
class Call:
    """One sample to be scored: `index` of those of the prompt `ordinal`."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    response_length: int
    ordinal: int
    index: int
    judge: str | None = None  # the address of the server to ask

    def __str__(self) -> str:
        return f"prompt {self.ordinal}, sample {self.index}, data_source {self.data_source!r}"


class Method:
    """The reward function with the manager around it.

    `mode` says how calls are made: `single`, one after the other; `concurrent`, coroutines at the same time;
    `batch`, as many as are waiting in one call of lists.
    """

    def __init__(self, spec: MethodSpec):
        """Load the user's code. Raises UserCodeError when it is missing, broken or of the wrong signature."""
        self._spec = spec
        arguments = BATCH_ARGUMENTS if spec.manager == "batch" else ARGUMENTS
        function: Callable[..., Any]
        judge = Judge(spec.judge_folder) if spec.judge_folder else None
        if not spec.by_rule:
            function, is_coroutine = _no_rule, False
        elif spec.functions:
            function, is_coroutine = load_weighted(spec.functions, arguments, spec.runner, judge)
        else:
            function, is_coroutine = load_function(spec.function, arguments, spec.runner, judge)
        if judge and not judge.asked:
            raise UserCodeError(
                f"reward.reward_model.rollout.name=vllm serves a judge, and no reward function takes {ADDRESS}, the "
                "address to ask it at"
            )
        self._score: Callable[..., Any]
        if spec.manager_path:
            make = load_name(spec.manager_path, spec.manager_name or "", MANAGER_KEY)
            manager = make(compute_score=function)
            if not callable(getattr(manager, "score", None)):
                raise UserCodeError(f"{MANAGER_KEY}: {spec.manager_name} in {spec.manager_path} needs a method score")
            check_signature(manager.score, [*ARGUMENTS, "response_length"], {}, spec.manager_path, MANAGER_KEY)
            self._score = manager.score
            is_coroutine = inspect.iscoroutinefunction(manager.score)
        else:
            self._score = lambda response_length, **call: function(**call)
        self.mode = "concurrent" if is_coroutine else "single"
        if spec.manager == "batch":
            self.mode = "batch"
            self._score_batch = function

    def start(self, call: Call) -> Any | Awaitable[Any]:
        """Call the user's code: its value, or an awaitable of it."""
        server_address.set(call.judge)
        return self._score(**{name: getattr(call, name) for name in (*ARGUMENTS, "response_length")})

    def start_batch(self, calls: Sequence[Call]) -> list[Any]:
        """Call the user's code with lists: one value for each call. Raises WrongResult for another number of them."""
        server_address.set(calls[0].judge)
        columns = {f"{name}s": [getattr(call, name) for call in calls] for name in ARGUMENTS}
        return each_of(self._score_batch(**columns), len(calls))

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


def _no_rule(**call: Any) -> Any:
    """0 for a call of one sample, a list of them for a call of lists."""
    texts = call.get("solution_strs")
    return 0.0 if texts is None else [0.0] * len(texts)


def overlong_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to limit - buffer, then down to -factor."""
    return min(-(length - (limit - buffer)) / buffer * factor, 0.0)
