"""Final answers of mathematical problems: finding them in a response, and telling whether two are the same.

Whether two answers are equal is math-verify's to say; it is imported when the first answers are compared, and its
time limits use alarm signals, so this runs in the main thread of a reward process.
"""

from __future__ import annotations

import re
from typing import Any

from jaxrl_ppo.rewards.scorers import scorer

BOX = re.compile(r"\\(?:boxed|fbox)\s*")
ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
LONGEST_ANSWER = 1000  # characters; a longer one is no final answer, and may take minutes to parse
MOST_BOXES = 20  # looked at, from the end, when they are not complete
PARSING_SECONDS = 5


@scorer("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_verify")
def boxed_math(solution_str: str, ground_truth: Any) -> float:
    r"""1 when the last \boxed{…} of the answer equals the right answer, else 0."""
    answer = last_boxed(solution_str)
    return float(answer is not None and same_answer(answer, str(ground_truth)))


@scorer("math_dapo", "math", "math_dapo_reasoning", "aime*")
def dapo_math(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """DAPO's rule (arXiv 2503.14476): the line `Answer: …`, the last of them; 1 when right, -1 when not."""
    lines = ANSWER_LINE.findall(solution_str)
    answer = lines[-1].strip().strip("*").strip() if lines else None
    if answer is not None:
        answer = last_boxed(answer) or answer
    right = answer is not None and same_answer(answer, str(ground_truth))
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer or ""}


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{…} (or \boxed 5) of `text`; None when there is none."""
    for match in reversed(list(BOX.finditer(text))[-MOST_BOXES:]):
        start = match.end()
        if text[start : start + 1] != "{":
            word = re.match(r"[^\s$.,]+", text[start:])
            if word:
                return word[0]
            continue
        depth = 0
        for end in range(start, len(text)):
            if text[end] in "{}" and text[end - 1] != "\\":
                depth += 1 if text[end] == "{" else -1
                if depth == 0:
                    return text[start + 1 : end].strip()
    return None


def same_answer(answer: str, truth: str) -> bool:
    """Whether two final answers, LaTeX or plain, mean the same."""
    answer, truth = _unwrapped(answer), _unwrapped(truth)
    if not answer or not truth or len(answer) > LONGEST_ANSWER:
        return False
    if _plain(answer) == _plain(truth):
        return True
    if "%" in answer + truth:  # "50 %" may stand for 50 (the per cent asked for) and for 0.5
        bare = [side.replace("\\%", "").replace("%", "") for side in (answer, truth)]
        part = [re.sub(r"([\d.,]+)\s*\\?%", r"\\frac{\1}{100}", side) for side in (answer, truth)]
        return _verified(*bare) or _verified(*part)
    return _verified(answer, truth)


def _verified(answer: str, truth: str) -> bool:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("the scorer for mathematics needs math-verify: pip install math-verify") from error
    sides = [parse(f"\\boxed{{{side}}}", parsing_timeout=PARSING_SECONDS) for side in (truth, answer)]
    return verify(*sides, timeout_seconds=PARSING_SECONDS)


def _unwrapped(text: str) -> str:
    """Without what surrounds an answer and is none of it: dollar signs, a box, a closing full stop."""
    text = last_boxed(text) or text
    text = text.strip().strip("$").strip()
    return text[:-1].rstrip() if text.endswith(".") else text


def _plain(text: str) -> str:
    """A spelling in which equal plain answers are mostly equal texts."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|displaystyle|,|;|!|:|quad)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text) if re.fullmatch(r"[-+$\\\s]*\d{1,3}(,\d{3})+", text) else text
    return re.sub(r"\s+", "", text).casefold()
