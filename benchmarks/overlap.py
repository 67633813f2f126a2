"""What one-step-off saves: the quickstart's steps in both modes, trainer and rollout each pinned to a core of its own.

    python benchmarks/overlap.py [--steps 6] [key=value …]

Prints, per mode, the median over the steps after the first two of generation, training and step time, the share of the
shorter of the two that the overlap hides, (generation + training - step) / min(generation, training), and how long the
generation of batch t+1 ran during the training of batch t, from the timeline.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxrl_ppo.observability.run_folder import read_metrics
from jaxrl_ppo.observability.timeline import generation_overlap, read_spans

HERE = Path(__file__).parent
TRAINING = ("old_log_prob", "ref", "adv", "update_actor")
WARM_UP = 2  # steps in which programs are compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    args, overrides = parser.parse_known_args()
    settings = [
        f"trainer.total_training_steps={args.steps}",
        "trainer.cpu_affinity=[0]",
        "actor_rollout_ref.rollout.cpu_affinity=[[1]]",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console]",
        *overrides,
    ]
    lines = []
    for mode in ("sync", "one_step_off"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "jaxrl_ppo.main", "--config-name", "quickstart", *settings]
            subprocess.run(
                [*command, f"trainer.mode={mode}", f"trainer.default_local_dir={folder}/run"],
                check=True,
                cwd=HERE.parent,
            )
            rows = [row for row in read_metrics(Path(folder, "run")) if row["step"] > WARM_UP][:-1]
            overlap = generation_overlap(read_spans(Path(folder, "run", "timeline.json")))
        generation, step = ([row[f"timing_s/{name}"] for row in rows] for name in ("gen", "step"))
        training = [sum(row.get(f"timing_s/{name}", 0.0) for name in TRAINING) for row in rows]
        hidden = [(g + t - s) / min(g, t) for g, t, s in zip(generation, training, step)]
        numbers = [statistics.median(values) for values in (generation, training, step, hidden)]
        stale = sorted({row["training/staleness"] for row in rows})
        text = "generation {:.1f} s, training {:.1f} s, step {:.1f} s, hidden {:.0%}".format(*numbers)
        seen = [overlap[row["step"]] for row in rows]
        lines.append(f"{mode:>12}: {text}; overlap {statistics.median(seen):.1f} s a step; staleness {stale}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
