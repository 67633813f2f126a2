"""Advantage estimators by name. A new one is a function with a registration line, and an import here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from jaxrl_ppo.algorithms.advantages import gae, group_baselines, grpo, reinforce, token_baseline  # noqa: F401 - register
from jaxrl_ppo.algorithms.advantages.inputs import AdvantageInputs
from jaxrl_ppo.algorithms.registry import ADVANTAGES, Advantage, find
from jaxrl_ppo.algorithms.settings import AdvantageSettings
from jaxrl_ppo.user_code import UserCodeError

AdvantageFunction = Callable[[AdvantageInputs], tuple[np.ndarray, np.ndarray]]


def find_advantage(spec: str) -> Advantage:
    """The advantage estimator called `spec`: a registered name or a user's `path/to/file.py:name`.

    Raises UserCodeError when there is none, naming algorithm.adv_estimator.
    """
    return find(ADVANTAGES, Advantage, spec, "algorithm.adv_estimator")


def advantage_function(estimator: Advantage, config: AdvantageSettings) -> AdvantageFunction:
    """A function from a step's inputs (numpy) to float32 advantages and returns, both [B, T]; compiled once per shape.

    Both are 0 outside the mask. The function raises ValueError when an input that the estimator needs is missing or
    does not suit it, or when its result is not finite; UserCodeError when a user's estimator fails or returns wrong
    shapes.
    """
    compiled = jax.jit(lambda inputs: estimator.function(inputs, config))

    def compute(inputs: AdvantageInputs) -> tuple[np.ndarray, np.ndarray]:
        missing = [name for name in estimator.needs if getattr(inputs, name) is None]
        if missing:
            raise ValueError(f"algorithm.adv_estimator={estimator.name} needs {', '.join(missing)}")
        # Any numbering of the groups will do; inside, ids run from 0 so that shapes are static.
        numbered = np.unique(np.asarray(inputs.group), return_inverse=True)[1].astype(np.int32)
        inputs = dataclasses.replace(inputs, group=numbered)
        if estimator.check:
            estimator.check(inputs)
        mask = np.asarray(inputs.mask)
        result = compiled(inputs)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise UserCodeError(f"algorithm.adv_estimator={estimator.name} must return advantages and returns")
        advantages, returns = (np.asarray(array, np.float32) for array in result)
        _check_result(estimator.name, "advantages", advantages, mask)
        _check_result(estimator.name, "returns", returns, mask)
        return np.where(mask > 0, advantages, np.float32(0)), np.where(mask > 0, returns, np.float32(0))

    return compute


def _check_result(estimator: str, name: str, result: np.ndarray, mask: np.ndarray) -> None:
    if result.shape != mask.shape:
        raise UserCodeError(f"algorithm.adv_estimator={estimator}: {name} have shape {result.shape}, not {mask.shape}")
    broken = np.flatnonzero(((mask > 0) & ~np.isfinite(result)).any(axis=-1))
    if len(broken):
        raise ValueError(
            f"algorithm.adv_estimator={estimator}: {name} are not finite in {len(broken)} samples, first in sample "
            f"{broken[0]}; check its rewards, values and log-probs"
        )
