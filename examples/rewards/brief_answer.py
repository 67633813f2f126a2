"""A reward function of one's own: right answers count, and the shorter the better.

    python -m jaxrl_ppo.main … reward.custom_reward_function.path=examples/rewards/brief_answer.py \
        reward.custom_reward_function.reward_kwargs.free_characters=20

The function runs in a process of its own. It may be a coroutine function, to wait for a service. It returns a number,
or a dict with `score` and further numbers, which become the metrics `reward/NAME/mean`.
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info, free_characters=20, cost=0.002):
    """1 for a right answer (the last integer counts), less `cost` for every character past `free_characters`."""
    integers = re.findall(r"-?\d+", solution_str)
    right = bool(integers) and int(integers[-1]) == int(ground_truth)
    excess = max(0, len(solution_str) - free_characters)
    return {"score": max(0.0, right - cost * excess) if right else 0.0, "acc": right, "characters": len(solution_str)}
