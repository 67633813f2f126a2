"""A second reward beside the right answer: a little for having called a tool and got an answer from it.

    python -m jaxrl_ppo.main … '+reward.functions.right={}' \
        '+reward.functions.tool={path: examples/rewards/uses_tool.py, weight: 0.2}'

`reward.functions` sums functions with weights; each part is a metric, `reward/right/mean` and `reward/tool/mean`. With
agent loops `extra_info` has `turns`: a list of {role, text}.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 when a tool answered without an error, half when it did with one, else 0."""
    answers = [turn["text"] for turn in extra_info.get("turns", []) if turn["role"] == "tool"]
    return max((0.5 if "error:" in text else 1.0 for text in answers), default=0.0)
