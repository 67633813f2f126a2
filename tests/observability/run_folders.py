"""A run folder of any size with made-up numbers, for the report: steps, samples of several turns, faults, timeline."""

from __future__ import annotations

from unittest import mock

import numpy as np

from jaxrl_ppo.observability.files import json_line
from jaxrl_ppo.observability.run_folder import RunFolder
from jaxrl_ppo.observability.timeline import Timeline


def write_run(path, *, steps, samples, seed=0, words=24, resumed_after=()):
    """Write a run of `steps` steps, ten seconds each, with `samples` samples each into the folder `path`: returned.

    It is resumed after the steps `resumed_after`. It begins at 01:46:40 on 2001-09-09, UTC.
    """
    rng = np.random.default_rng(seed)
    folder = RunFolder(path)
    folder.start(config_yaml=f"trainer:\n  seed: {seed}\n", resume_step=None)
    folder.samples.mkdir(exist_ok=True)
    timeline = Timeline(folder.timeline)
    vocabulary = np.array(["the", " sum", " is", " 12", " and", " 30", " so", " 42", "\n", "."])
    clock = 1e9
    metrics, tool = [], "<tool_response>\n42\n</tool_response>"
    for step in range(1, steps + 1):
        reward = 1 - np.exp(-step / (steps / 3)) + rng.normal(0, 0.03)
        row = {
            "step": step,
            "critic/score/mean": reward,
            "response_length/mean": 24 + rng.normal(),
            "actor/grad_norm": 1 + rng.normal(0, 0.1),
            "actor/entropy": 1 / step,
            "training/staleness": float(step > 1),
            "timing_s/step": 10.0,
            "timing_s/gen": 7.0,
            "timing_s/update_actor": 8.0,
            "perf/idle_share/trainer": 0.2,
            "perf/idle_share/rollout": 0.3,
        }
        if step % 5 == 0:
            row["val-core/sums/acc/mean@1"] = reward
        metrics.append(json_line(row))
        timeline.event("gen", clock - 7, clock, step=step, track="generation")
        timeline.event("tools", clock - 5, clock - 4.5, step=step, track="tools")
        timeline.event("update_actor", clock, clock + 8, step=step, track="update_actor")
        if step % 50 == 0:
            timeline.instant("replica 0 replaced", step=step)
        clock += 10
        if step in resumed_after:
            timeline.flush()
            with mock.patch("time.time", return_value=clock):
                timeline = Timeline(folder.timeline, resume_step=step)
        rows = []
        for number in range(samples):
            text = rng.choice(vocabulary, words)
            right = bool(rng.random() < reward)
            question = f"What is {12 + number // 8} + {step}?"
            sample = {
                "step": step,
                "ordinal": step * samples // 8 + number // 8,
                "index": number % 8,
                "source": ("sums", "products")[number % 2],
                "prompt": f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
                "question": question,
                "response": "".join(text) + tool,
                "ground_truth": "42",
                "reward": float(right) + 0.2 * (number % 3 == 0),
                "reward_parts": {"right": float(right), "tool": float(number % 3 == 0)},
                "labels": {"pred": "42" if right else "41"},
                "length": words,
                "finish_reason": "stop",
                "versions": [[step - 1, words]],
            }
            if number < 64:
                sample["turns"] = [["assistant", 0, 8], ["tool", 8, 16], ["assistant", 16, words]]
                sample["tokens"] = text.tolist()
                sample["log_probs"] = np.round(-rng.exponential(1, words), 3).tolist()
                sample["trainer_log_probs"] = np.round(-rng.exponential(1, words), 3).tolist()
                sample["mask"] = [[1, 8], [0, 8], [1, words - 16]]
            rows.append(json_line(sample))
        (folder.samples / f"rollout_{step:06d}.jsonl").write_text("".join(rows))
    folder.metrics.write_text("".join(metrics))
    timeline.flush()
    return folder.path
