"""Multiple choice: which letter a response settles on."""

from __future__ import annotations

import re
from typing import Any

from jaxrl_ppo.rewards.math_answers import last_boxed
from jaxrl_ppo.rewards.scorers import scorer

LETTERS = "ABCDEFGHIJ"
# From the clearest statement to the vaguest; of one form, the last in the text counts.
FORMS = (
    re.compile(r"<answer>\W*(?:option\s+)?([A-J])\b", re.IGNORECASE),
    re.compile(r"\b(?i:answer|choice|option)\b(?:\s+is)?\s*[:=]?\s*(?:option\s+)?[*_($\[\"'\s]*([A-J])\b(?!['\u2019])"),
    re.compile(r"^\W*([A-J])\W*$", re.MULTILINE),
    re.compile(r"[(\[*]([A-J])[)\]*]"),
    re.compile(r"^\W*([A-J])[.):]\s", re.MULTILINE),
)


@scorer("multiple_choice", "mmlu*", "gpqa*", "arc_easy", "arc_challenge")
def multiple_choice(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """1 when the response settles on the right letter, else 0. The right answer is a letter, or its number from 0."""
    right = LETTERS[int(ground_truth)] if str(ground_truth).isdigit() else str(ground_truth).strip(" ().").upper()
    found = chosen_letter(solution_str)
    return {"score": float(found == right), "acc": found == right, "pred": found or ""}


def chosen_letter(text: str) -> str | None:
    r"""The letter that `text` settles on: in a \boxed{…}, after "answer", alone on a line, or in brackets; or None."""
    box = last_boxed(text)
    if box is not None:
        letter = re.fullmatch(r"\W*(?:\\text\w*\{)?\W*([A-Ja-j])\b.*", box, re.DOTALL)
        if letter:
            return letter[1].upper()
    for form in FORMS:
        found = form.findall(text)
        if found:
            return found[-1].upper()
    return None
