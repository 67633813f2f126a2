"""Names of advantage estimators and policy losses, and how a user's own are found: `path/to/file.py:name`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from jaxrl_ppo.user_code import UserCodeError, load_name, located


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
    path, _, name = spec.rpartition(":")
    function = load_name(path, name, f"{key}={spec}")
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


def _located(function: Callable[..., Any], spec: str, key: str) -> Callable[..., Any]:
    """`function`, with its exceptions turned into a UserCodeError that names file and line."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with located(spec.rpartition(":")[0], f"{key}={spec}"):
            return function(*args)

    return call
