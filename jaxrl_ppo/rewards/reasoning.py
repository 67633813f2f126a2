"""Tasks of reasoning-gym: the package that made a question also says what an answer to it is worth."""

from __future__ import annotations

import functools
import json
from typing import Any

from jaxrl_ppo.rewards.scorers import scorer


@scorer("reasoning_gym/*", needs=("extra_info",))
def reasoning_gym(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, Any]:
    """The task's own score, 0 to 1, of what stands between <answer> tags, or of the whole last turn without them.

    `extra_info` names task, seed, size, config (JSON) and index, as examples/data_preprocess/reasoning_tasks.py writes
    them: the question is made anew, since some tasks score with objects that no file holds.
    """
    try:
        from reasoning_gym.utils import extract_answer
    except ImportError as error:
        raise ImportError(
            "this data source is scored by the package reasoning-gym: pip install reasoning-gym"
        ) from error
    turns = extra_info.get("turns")
    text = turns[-1]["text"] if turns else solution_str
    tagged = extract_answer(text)
    answer = text.strip() if tagged is None else tagged
    task = _task(extra_info["task"], extra_info["seed"], extra_info["size"], extra_info.get("config") or "{}")
    score = float(task.score_answer(answer, task[extra_info["index"]]))
    return {"score": score, "acc": score >= 1, "tagged": tagged is not None, "pred": answer}


@functools.lru_cache(64)
def _task(name: str, seed: int, size: int, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))
