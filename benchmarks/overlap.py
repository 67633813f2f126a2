"""What overlapping generation and training saves: the quickstart's steps in every mode, on the same two cores.

    python benchmarks/overlap.py [--modes sync …] [--steps 6] [--seeds 1] [key=value …]

Trainer and rollout are pinned to a core each, or, in turns, to both. Prints, per mode, as mean and standard deviation
over the seeds, the medians over the steps after the first two of generation, training and step time, and the accuracy
on the validation sums after the last step; the share of the shorter of generation and training that the overlap hides,
(generation + training - step) / min(generation, training); how long a step takes against the longer of the two; and
how long the generation of batch t+1 ran during the training of batch t, from the timeline.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxrl_ppo.observability.run_folder import read_metrics
from jaxrl_ppo.observability.timeline import generation_overlap, read_spans

HERE = Path(__file__).parent
APART = ("trainer.cpu_affinity=[0]", "actor_rollout_ref.rollout.cpu_affinity=[[1]]")
MODES = {
    "sync": ("trainer.mode=sync", *APART),
    "sync, in turns": (
        "trainer.mode=sync",
        "actor_rollout_ref.hybrid_engine=true",
        "trainer.cpu_affinity=[0,1]",
        "actor_rollout_ref.rollout.cpu_affinity=[[0,1]]",
    ),
    "one-step-off": ("trainer.mode=one_step_off", *APART),
    "async": ("trainer.mode=async", *APART),
}
TRAINING = ("old_log_prob", "ref", "adv", "update_actor")
WARM_UP = 2  # steps in which programs are compiled


def measure(mode: str, steps: int, seed: int, overrides: Sequence[str]) -> dict[str, float]:
    """One run's medians in seconds, its accuracy and its staleness."""
    settings = [
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        "trainer.logger=[console]",
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        *MODES[mode],
        *overrides,
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxrl_ppo.main", "--config-name", "quickstart", *settings]
        subprocess.run([*command, f"trainer.default_local_dir={folder}/run"], check=True, cwd=HERE.parent)
        rows = read_metrics(Path(folder, "run"))
        overlap = generation_overlap(read_spans(Path(folder, "run", "timeline.json")))
    accuracy = next(value for name, value in rows[-1].items() if name.startswith("val-core/"))
    rows = [row for row in rows if row["step"] > WARM_UP][:-1]  # the last one validates
    # Asynchronous rollouts generate all the time, and `gen` is then what a step had to wait for.
    generation = math.nan if mode == "async" else statistics.median(row["timing_s/gen"] for row in rows)
    training = statistics.median(sum(row.get(f"timing_s/{name}", 0.0) for name in TRAINING) for row in rows)
    step = statistics.median(row["timing_s/step"] for row in rows)
    return {
        "generation": generation,
        "training": training,
        "step": step,
        "hidden": (generation + training - step) / min(generation, training),
        "step / longer": step / max(training, generation),  # NaN is not larger
        "overlap": statistics.median(overlap[row["step"]] for row in rows),
        "staleness": max(row["training/staleness"] for row in rows),
        "accuracy": accuracy,
    }


def main() -> None:
    """Every mode and seed, one after another; a line for each run and a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    args, overrides = parser.parse_known_args()
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in args.modes}
    for seed in range(1, args.seeds + 1):
        for mode in args.modes:
            found[mode].append(result := measure(mode, args.steps, seed, overrides))
            print(mode, seed, {name: round(value, 3) for name, value in result.items()}, flush=True)
    names = list(found[args.modes[0]][0])
    print(f"| mode | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for mode, results in found.items():
        cells = []
        for name in names:
            values = [result[name] for result in results]
            if any(map(math.isnan, values)):  # which statistics.stdev does not take
                cells.append("")
                continue
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.2f}{spread}")
        print(f"| {mode} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
