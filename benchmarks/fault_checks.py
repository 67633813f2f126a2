"""What a short run's own records say of it: prompts lost or repeated, and errors that nobody was told of."""

from __future__ import annotations

import collections
import json
import math
from pathlib import Path
from typing import Any

from jaxrl_ppo.observability.run_folder import read_metrics

PROMPTS, SAMPLES = 4, 4  # of a step
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 7 / 7
"""

Rows = dict[int, list[dict[str, Any]]]


def trained(folder: Path) -> Rows:
    """By step, the samples that were trained, as the run wrote them."""
    return {
        int(path.stem.rpartition("_")[2]): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / "samples").glob("rollout_*.jsonl"))
    }


def lost_prompts(rows: Rows, steps: int, *, in_order: bool) -> list[str]:
    """What is wrong with which samples were trained when; nothing, if each was trained once.

    With `in_order` step s trains the prompts PROMPTS * (s - 1) and on; otherwise each prompt once, whenever.
    """
    seen = {step: [(row["ordinal"], row["index"]) for row in samples] for step, samples in rows.items()}
    if in_order:
        expected = {
            step: [(PROMPTS * (step - 1) + i, k) for i in range(PROMPTS) for k in range(SAMPLES)]
            for step in range(1, steps + 1)
        }
        return [] if seen == expected else [f"samples trained, by step: {seen}"]
    counts = collections.Counter(pair for step in seen.values() for pair in step)
    wrong = {pair: counts[pair] for pair in counts if counts[pair] != 1}
    wrong |= {(i, k): 0 for i in range(PROMPTS * steps) for k in range(SAMPLES) if (i, k) not in counts}
    wrong |= {pair: count for pair, count in counts.items() if pair[0] >= PROMPTS * steps}
    return [f"trained other than once: {wrong}"] if wrong else []


def silent_errors(folder: Path, rows: Rows, steps: int, *, staleness: int) -> list[str]:
    """What a run that ended properly should have made otherwise, or told of; nothing, if all is well.

    Every step is in the metrics once, with a finite gradient; every sample has the reward of its text, unless it says
    that there is none; its tokens are of weights that the mode allows; the last step's checkpoint is committed.
    """
    wrong = []
    metrics = [row for row in read_metrics(folder) if row["step"]]
    if [row["step"] for row in metrics] != list(range(1, steps + 1)):
        wrong.append(f"steps in the metrics: {[row['step'] for row in metrics]}")
    wrong += [
        f"step {row['step']}: no finite gradient"
        for row in metrics
        if not isinstance(norm := row.get("actor/grad_norm"), float) or not math.isfinite(norm)
    ]
    scope: dict[str, Any] = {}
    exec(REWARD, scope)  # the reward function of these runs
    failed: collections.Counter[int] = collections.Counter()
    for step, samples in rows.items():
        for row in samples:
            where = f"step {step}, prompt {row['ordinal']}, sample {row['index']}"
            if "failure" in row.get("labels", {}):
                failed[step] += 1
            elif not math.isclose(row["reward"], scope["compute_score"]("", row["response"], "", {}), abs_tol=1e-6):
                wrong.append(f"{where}: reward {row['reward']} for {row['response']!r}")
            ages = [step - 1 - version for version, _ in row["versions"]]
            if not 0 <= min(ages) <= max(ages) <= staleness:
                wrong.append(f"{where}: tokens of weight versions {row['versions']}")
            if not len(row["tokens"]) == len(row["log_probs"]) == sum(count for _, count in row["versions"]):
                wrong.append(f"{where}: {len(row['tokens'])} tokens, {len(row['log_probs'])} log-probs")
    told = {row["step"]: row.get("reward/failures", 0) for row in metrics}
    wrong += [
        f"step {s}: {n} samples without a reward, {told.get(s)} told" for s, n in failed.items() if told.get(s) != n
    ]
    if not (folder / f"global_step_{steps}" / "COMMITTED").exists():
        wrong.append(f"no checkpoint of step {steps}")
    return wrong


def faults(folder: Path) -> dict[str, float]:
    """The sum of each `fault/*` and `reward/failures*` over the run."""
    totals: collections.Counter[str] = collections.Counter()
    for row in read_metrics(folder):
        for name, value in row.items():
            if name.startswith(("fault/", "reward/failures")) and value:
                totals[name] += value
    return dict(totals)


def unlike(one: Path, other: Path, steps: int) -> list[str]:
    """How the runs in two folders differ in samples or, to the bit, in the exported weights after the last step."""
    differ = []
    rows, others = trained(one), trained(other)
    if rows != others:
        steps_apart = [step for step in sorted(rows.keys() | others.keys()) if rows.get(step) != others.get(step)]
        differ.append(f"other samples than in the undisturbed run in steps {steps_apart}")
    file = f"global_step_{steps}/huggingface/model.safetensors"
    if (one / file).read_bytes() != (other / file).read_bytes():
        differ.append("other parameters than in the undisturbed run")
    return differ
