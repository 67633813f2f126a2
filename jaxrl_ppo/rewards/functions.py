"""The user's reward functions, or the scorers of the data sources: loading them, and the weighted sum of several."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl_ppo.rewards import choices, code, math_answers, reasoning  # noqa: F401 - register their scorers
from jaxrl_ppo.rewards.judge import Judge
from jaxrl_ppo.rewards.results import Result, WrongResult, interpret
from jaxrl_ppo.rewards.scorers import score_by_source
from jaxrl_ppo.user_code import UserCodeError, load_name

FUNCTION_KEY = "reward.custom_reward_function"
FUNCTIONS_KEY = "reward.functions"

# What a reward function is called with, by keyword; the batch manager's gets lists.
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = tuple(f"{name}s" for name in ARGUMENTS)


@dataclasses.dataclass(frozen=True)
class FunctionSpec:
    """One reward function. Without `path` it is the scorer that belongs to the row's data source."""

    path: str | None = None
    name: str = "compute_score"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight: float = 1.0
    key: str = FUNCTION_KEY  # the configuration key, for messages

    def __str__(self) -> str:
        return f"{self.name} of {self.path} ({self.key})" if self.path else "the data source's own scorer"


def load_function(
    spec: FunctionSpec, names: Sequence[str], runner: code.CodeRunner, judge: Judge | None
) -> tuple[Callable[..., Any], bool]:
    """The function with its configured arguments, and whether it is a coroutine function.

    `names` are the arguments that it will be called with; `runner` is for the scorers that run code, `judge` for
    functions that ask it. Raises UserCodeError when it is missing, broken or of another signature.
    """
    if spec.path is None:
        ours = score_by_source if names == ARGUMENTS else _score_each_by_source
        return functools.partial(ours, runner=runner, **spec.arguments), False
    function = load_name(spec.path, spec.name, spec.key)
    if names == BATCH_ARGUMENTS and inspect.iscoroutinefunction(function):
        raise UserCodeError(f"{spec.key}: with the batch manager it must be a plain function, not async")
    further = judge.wanted(function, spec.arguments) if judge else []
    check_signature(function, [*names, *further], spec.arguments, spec.path, spec.key)
    loaded: Callable[..., Any] = functools.partial(function, **spec.arguments)
    if judge and further:
        loaded = judge.give(loaded, further)
    return loaded, inspect.iscoroutinefunction(function)


def _score_each_by_source(**columns: Any) -> list[Any]:
    rows = zip(*(columns.pop(name) for name in BATCH_ARGUMENTS))
    return [score_by_source(*row, **columns) for row in rows]


def load_weighted(
    specs: dict[str, FunctionSpec], names: Sequence[str], runner: code.CodeRunner, judge: Judge | None
) -> tuple[Callable[..., Any], bool]:
    """One function that returns the weighted sum of several, with each of them as a part, and whether it must be
    awaited. Plain functions among coroutine functions are called first. Functions of lists give one of lists."""
    loaded = {part: load_function(spec, names, runner, judge) for part, spec in specs.items()}

    def together(**columns: Any) -> list[dict[str, Any]]:
        count = len(columns[BATCH_ARGUMENTS[0]])
        results: dict[str, list[Result]] = {}
        for part, (function, _) in loaded.items():
            values = function(**columns)
            with _naming(part):
                results[part] = [interpret(value) for value in each_of(values, count)]
        return [_sum(specs, {part: of_part[i] for part, of_part in results.items()}) for i in range(count)]

    def plain(**call: Any) -> dict[str, Any]:
        return _sum(specs, {part: _read(part, function(**call)) for part, (function, _) in loaded.items()})

    async def waiting(**call: Any) -> dict[str, Any]:
        values = {part: function(**call) for part, (function, _) in loaded.items()}
        return _sum(
            specs, {p: _read(p, await value if inspect.isawaitable(value) else value) for p, value in values.items()}
        )

    if names == BATCH_ARGUMENTS:
        return together, False
    must_wait = any(is_coroutine for _, is_coroutine in loaded.values())
    return (waiting if must_wait else plain), must_wait


def each_of(values: Any, count: int) -> list[Any]:
    """What a function of lists returned for `count` samples. Raises WrongResult unless that is a value for each."""
    values = list(values)
    if len(values) != count:
        raise WrongResult("type", f"the reward function returned {len(values)} results for {count} samples")
    return values


def _read(part: str, value: Any) -> Result:
    with _naming(part):
        return interpret(value)


@contextlib.contextmanager
def _naming(part: str) -> Iterator[None]:
    """What is wrong with a result names the part that it is of."""
    try:
        yield
    except WrongResult as error:
        raise WrongResult(error.kind, f"{FUNCTIONS_KEY}.{part}: {error}") from None


def _sum(specs: dict[str, FunctionSpec], results: dict[str, Result]) -> dict[str, Any]:
    """`score` is the weighted sum. Numbers and texts of a part come as part/name; `acc` and `pred` also by themselves,
    from the first part that has them, since validation reads them."""
    out: dict[str, Any] = {"score": sum(specs[part].weight * result.reward for part, result in results.items())}
    for part, result in results.items():
        out[part] = result.reward
        further: dict[str, Any] = {**result.parts, **result.labels}
        for name, value in further.items():
            if name != "score":
                out[f"{part}/{name}"] = value
            if name in ("acc", "pred"):
                out.setdefault(name, value)
    return out


def check_signature(function: Any, names: Sequence[str], arguments: dict[str, Any], path: str, key: str) -> None:
    """Raise UserCodeError unless `function` can be called with keyword arguments `names` and `arguments`."""
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
