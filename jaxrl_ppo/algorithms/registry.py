"""Names of advantage estimators and policy losses, and how a user's own are found: `path/to/file.py:name`."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np


class UserCodeError(Exception):
    """A user's file or function is missing or broken; the message names the configuration key, file and line."""


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and what its caller must know.

    `function(inputs: PolicyLossInputs, config)` returns the loss of each token [..., T] and a dict of metrics, each an
    array of the same shape to be averaged over the mask. `aggregation`, when set, replaces the configured
    loss_agg_mode. `needs` names optional fields of PolicyLossInputs that must be there. `select`, when set, is called
    on the host once per global mini-batch, `select(old_log_probs, advantages, mask, config, seed)` -> bool, all
    [B, T]; its result goes into `inputs.selected`.
    """

    name: str
    function: Callable[..., Any]
    aggregation: str | None = None
    needs: tuple[str, ...] = ()
    select: Callable[..., np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Advantage:
    """An advantage estimator and what its caller must know.

    `function(inputs: AdvantageInputs, config)` returns advantages and returns, both [B, T]; it is jitted. `needs`
    names optional fields of AdvantageInputs that must be there. `check`, when set, gets the same inputs as numpy
    before the call and raises ValueError on what the jitted function could not report.
    """

    name: str
    function: Callable[..., Any]
    needs: tuple[str, ...] = ()
    check: Callable[..., None] | None = None


Entry = TypeVar("Entry", PolicyLoss, Advantage)

POLICY_LOSSES: dict[str, PolicyLoss] = {}
ADVANTAGES: dict[str, Advantage] = {}


def policy_loss(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a policy loss. `attributes` are PolicyLoss's other fields."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _add(POLICY_LOSSES, PolicyLoss(name, function, **attributes))
        return function

    return register


def advantage(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as an advantage estimator. `attributes` are Advantage's other fields."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _add(ADVANTAGES, Advantage(name, function, **attributes))
        return function

    return register


def _add(registry: dict[str, Any], entry: Any) -> None:
    if entry.name in registry:
        raise ValueError(f"the name {entry.name!r} is already taken by {registry[entry.name].function.__module__}")
    registry[entry.name] = entry


def find(registry: dict[str, Entry], make: Callable[[str, Callable[..., Any]], Entry], spec: str, key: str) -> Entry:
    """The entry of `registry` called `spec`, or one made from a user's `path/to/file.py:name`.

    `key` is the configuration key for messages. Raises UserCodeError when there is none.
    """
    if spec in registry:
        return registry[spec]
    if ":" not in spec:
        raise UserCodeError(
            f"{key}={spec}: not one of {', '.join(sorted(registry))}, and not of the form path/to/file.py:name"
        )
    function = resolve(spec, key)
    # A user may also use the decorator, to say what the function needs.
    entry = next((known for known in registry.values() if known.function is function), make(spec, function))
    users: dict[str, Any] = {n: _located(f, spec, key) for n, f in vars(entry).items() if callable(f)}
    return dataclasses.replace(entry, **users)


def resolve(spec: str, key: str, arguments: int = 2) -> Callable[..., Any]:
    """The function that `spec`, `path/to/file.py:name`, means. A file is executed once per process.

    `key` is the configuration key for messages; `arguments` is how many positional arguments the function must take.
    Raises UserCodeError when the file is missing or fails (with the line), or has no such function.
    """
    file_name, _, name = spec.rpartition(":")
    path = Path(file_name).expanduser().resolve()
    if not path.is_file():
        raise UserCodeError(f"{key}={spec}: there is no file {path}")
    module = _load(path, f"{key}={spec}")
    function = getattr(module, name, None)
    if function is None:
        own = sorted(n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__)
        raise UserCodeError(f"{key}={spec}: {path} has no {name!r}; its functions: {', '.join(own) or 'none'}")
    if not callable(function):
        raise UserCodeError(f"{key}={spec}: {name!r} in {path} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError as error:
        line = inspect.getsourcelines(function)[1] if inspect.isfunction(function) else 1
        raise UserCodeError(
            f"{key}={spec}: {name} must take {arguments} positional arguments: {error} ({path}, line {line})"
        ) from error
    return function


_modules: dict[Path, ModuleType] = {}


def _load(path: Path, where: str) -> ModuleType:
    if path in _modules:
        return _modules[path]
    name = f"jaxrl_ppo_user_{path.stem}_{len(_modules)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserCodeError(f"{where}: {path} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserCodeError(f"{where}: {_describe(error, path)}") from error
    _modules[path] = module
    return module


def _describe(error: Exception, path: Path) -> str:
    """`error` in one line, with the last line of the user's file that it passed through."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    line = f", line {frames[-1].lineno}, in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}: {error} ({path}{line})"


def _located(function: Callable[..., Any], spec: str, key: str) -> Callable[..., Any]:
    """`function`, with its exceptions turned into a UserCodeError that names file and line."""
    path = Path(spec.rpartition(":")[0]).expanduser().resolve()

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            raise UserCodeError(f"{key}={spec}: {_describe(error, path)}") from error

    return call
