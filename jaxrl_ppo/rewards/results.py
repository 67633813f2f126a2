"""What a reward call gives: a number and its parts, or a failure of some kind."""

from __future__ import annotations

import dataclasses
import math
import struct
import traceback
from pathlib import Path
from typing import Any

FLOAT32_MAX = 3.4028234663852886e38
LABEL_LENGTH = 2000
TRACEBACK_LENGTH = 4000


class RewardError(Exception):
    """Rewards cannot be had: a reward function that cannot be loaded, or too many failures in one batch."""


class WrongResult(Exception):
    """A reward function returned something that is no reward."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a call gave no reward.

    `kind` is `exception` (it raised), `timeout`, `crash` (its process died), `memory` (it ran out of what
    reward.worker_memory_mb allows), `nan` (it returned NaN or infinity) or `type` (it returned no number).
    """

    kind: str
    message: str
    traceback: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One call's outcome. A failed call has reward 0 and a `failure`."""

    reward: float
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    failure: Failure | None = None


def failed(kind: str, message: str, trace: str = "") -> Result:
    """The outcome of a call that failed."""
    return Result(0.0, failure=Failure(kind, message, trace))


def interpret(value: Any) -> Result:
    """A reward function's return value: a number, or a dict with `score` and further numbers (`parts`).

    Text in the dict is kept as a label (e.g. the extracted answer), None is left out. Numbers become float32.
    Raises WrongResult for anything else.
    """
    if not isinstance(value, dict):
        return Result(_number(value, "the reward function returned"))
    if "score" not in value:
        raise WrongResult("type", f"the reward function returned a dict without 'score'; its keys: {sorted(value)}")
    parts, labels = {}, {}
    for name, part in value.items():
        if isinstance(part, str) and name != "score":
            labels[str(name)] = part[:LABEL_LENGTH]
        elif part is not None or name == "score":
            number = float(part) if isinstance(part, bool) and name != "score" else part
            parts[str(name)] = _number(number, f"the reward function returned {name!r}:")
    return Result(parts["score"], parts, labels)


def _number(value: Any, what: str) -> float:
    """`value`, a Python, numpy or array scalar, rounded to float32."""
    if isinstance(value, bool):
        raise WrongResult("type", f"{what} {value}, a bool; return a number, e.g. float({value})")
    if not isinstance(value, int | float) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        shown = repr(value)
        shown = shown if len(shown) <= 100 else shown[:97] + "..."
        raise WrongResult("type", f"{what} {shown}, a {type(value).__name__}, not a number")
    if not math.isfinite(value) or abs(value) > FLOAT32_MAX:
        raise WrongResult("nan", f"{what} {value}, which is no finite float32")
    return struct.unpack("f", struct.pack("f", value))[0]


def from_exception(error: BaseException) -> Result:
    """The outcome of a call that raised `error`. The message ends with the line where the user's code raised it."""
    if isinstance(error, WrongResult):
        return failed(error.kind, str(error))
    frames = traceback.extract_tb(error.__traceback__)
    inner = [frame for frame in frames if Path(__file__).parent != Path(frame.filename).parent]
    line = f" ({inner[0].filename}, line {inner[0].lineno})" if inner else ""
    text = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {text[0][:300] if text else '(no message)'}{line}"
    kind = "memory" if isinstance(error, MemoryError) else "exception"
    return failed(kind, message, _users_traceback(error)[-TRACEBACK_LENGTH:])


def _users_traceback(error: BaseException) -> str:
    """The traceback without what lies between the process's start and the user's code."""
    report = traceback.TracebackException.from_exception(error)
    ours = [i for i, frame in enumerate(report.stack) if Path(frame.filename).parent == Path(__file__).parent]
    if ours and ours[-1] + 1 < len(report.stack):
        del report.stack[: ours[-1] + 1]
    return "".join(report.format())
