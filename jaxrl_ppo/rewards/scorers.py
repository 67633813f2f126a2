"""The scorers that come along, by data source; here sums and GSM8K, others in modules of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Scorer = Callable[..., Any]

SCORERS: dict[str, Scorer] = {}
NEEDS: dict[Scorer, tuple[str, ...]] = {}  # what a scorer takes besides the response and the right answer

# A number as people and models write it: sign, digits with or without thousands separators, decimals, or a fraction.
NUMBER = r"[-+\u2212]?\s?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)?"
AFTER_HASHES = re.compile(rf"####\s*[*$\\({{]*\s*(?P<number>{NUMBER})")
ANYWHERE = re.compile(rf"(?<![\w.])(?P<number>{NUMBER})")


def scorer(*sources: str, needs: tuple[str, ...] = ()) -> Callable[[Scorer], Scorer]:
    """Registers the decorated function for these values of the `data_source` column; `aime*` means a beginning.

    `needs` names what else it takes: `extra_info`, or `runner` (a CodeRunner).
    """

    def register(function: Scorer) -> Scorer:
        SCORERS.update(dict.fromkeys(sources, function))
        NEEDS[function] = needs
        return function

    return register


def score_by_source(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    runner: Any = None,
    **arguments: Any,
) -> Any:
    """The score by the scorer that is registered for `data_source`. LookupError when there is none."""
    function = find_scorer(data_source)
    if function is None:
        raise LookupError(unknown_source(data_source))
    context = {"extra_info": extra_info, "runner": runner}
    return function(solution_str, ground_truth, **{name: context[name] for name in NEEDS[function]}, **arguments)


def find_scorer(data_source: str) -> Scorer | None:
    """The scorer for a data source, or None."""
    if data_source in SCORERS:
        return SCORERS[data_source]
    beginnings = [name for name in SCORERS if name.endswith("*") and data_source.startswith(name[:-1])]
    return SCORERS[max(beginnings, key=len)] if beginnings else None


def unknown_source(data_source: str) -> str:
    """What to tell a user whose data source has no scorer."""
    return (
        f"no scorer for data_source {data_source!r} (there are: {', '.join(sorted(SCORERS))}); "
        "give a reward function with reward.custom_reward_function.path"
    )


@scorer("arithmetic")
def arithmetic(solution_str: str, ground_truth: Any) -> float:
    """1 when the last integer of the answer is the right one, else 0."""
    integers = re.findall(r"-?\d+", solution_str)
    return float(bool(integers) and int(integers[-1]) == int(ground_truth))


@scorer("openai/gsm8k", "gsm8k")
def gsm8k(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """GSM8K (arXiv 2110.14168): `score` when the answer is right, `format_score` when it is only found, else 0.

    `strict` takes the number after the last `####`, `flexible` the last number anywhere.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r} is neither strict nor flexible")
    pattern = AFTER_HASHES if method == "strict" else ANYWHERE
    found = [number for match in pattern.finditer(solution_str) if (number := to_number(match["number"])) is not None]
    if not found:
        return 0.0
    return score if found[-1] == to_number(str(ground_truth)) else format_score


def to_number(text: str) -> Fraction | None:
    """The exact value of a number in one of the usual spellings; None when it is none."""
    plain = text.replace("\u2212", "-").translate(str.maketrans("", "", "$, %+")).rstrip(".")
    try:
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return None
