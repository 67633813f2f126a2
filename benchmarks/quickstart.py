"""The quickstart against the plain torch loop on the same questions: seconds a step and to 0.70, accuracy.

    python benchmarks/quickstart.py [--steps 20] [--seeds 1] [--dtype float32] [key=value …]

Both train the same model, step for step on the same questions in batches of the same size, and validate every five
steps on the same 64 held-out ones; for each seed the torch loop runs first and ours after it. Clocks start when the
model is ready, before the first validation; ours includes compilation, and `from the command` also the start of Ray and
of every process. Further arguments are overrides of the quickstart.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl_ppo.observability.run_folder import read_metrics
from jaxrl_ppo.observability.timeline import read_spans

HERE = Path(__file__).parent
DATA = HERE.parent / ".quickstart"
GOAL = 0.70


@dataclasses.dataclass
class Outcome:
    """What one side did in one run."""

    seconds: list[float]  # of each step
    curve: list[tuple[int, float, float]]  # of each validation: step, seconds since the first began, accuracy
    start: float = 0.0  # seconds from the command to the first validation

    def to_goal(self) -> float | None:
        """Seconds to the first validation that reaches the goal."""
        return next((elapsed for _, elapsed, accuracy in self.curve if accuracy >= GOAL), None)


def run_torch(model: str, steps: int, seed: int, dtype: str) -> tuple[Outcome, list[tuple[int, int]]]:
    """The torch loop, and the questions that it trained on, in order."""
    options = {"--steps": steps, "--seed": seed, "--dtype": dtype}
    command = [sys.executable, HERE / "torch_grpo.py", model, *(str(part) for pair in options.items() for part in pair)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    trained = [line for line in lines if "seconds" in line]
    curve = [(line["step"], line["elapsed"], line["accuracy"]) for line in lines if "accuracy" in line]
    questions = [(a, b) for line in trained for a, b in line["questions"]]
    return Outcome([line["seconds"] for line in trained], curve), questions


def run_ours(steps: int, seed: int, questions: list[tuple[int, int]], overrides: list[str]) -> Outcome:
    """The quickstart on these questions, in this order."""
    rows = pq.read_table(DATA / "train.parquet").to_pylist()
    by_question = {(row["extra_info"]["a"], row["extra_info"]["b"]): row for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        train = Path(folder, "train.parquet")
        pq.write_table(pa.Table.from_pylist([by_question[question] for question in questions]), train)
        settings = [
            f"data.train_files={train}",
            "data.shuffle=false",
            f"actor_rollout_ref.rollout.seed={seed}",
            f"trainer.default_local_dir={folder}/run",
            f"trainer.total_training_steps={steps}",
        ]
        command = [sys.executable, "-m", "jaxrl_ppo.main", "--config-name", "quickstart", *settings, *overrides]
        launched = time.time()
        subprocess.run(command, check=True, cwd=HERE.parent)
        metrics = {row["step"]: row for row in read_metrics(Path(folder, "run"))}
        validations = [s for s in read_spans(Path(folder, "run", "timeline.json")) if s.track == "validation"]
    begin = min(span.start for span in validations)
    curve = [
        (span.step, span.end - begin, next(v for k, v in metrics[span.step].items() if k.startswith("val-core/")))
        for span in validations
    ]
    seconds = [
        metrics[step]["timing_s/step"] - metrics[step].get("timing_s/testing", 0) for step in range(1, steps + 1)
    ]
    return Outcome(seconds, curve, begin - launched)


def show(theirs: Outcome, ours: Outcome) -> None:
    """One seed's comparison."""
    print(f"{'step':>6} {'torch s':>9} {'accuracy':>9} {'ours s':>9} {'accuracy':>9}")
    for (step, seconds, accuracy), (_, our_seconds, our_accuracy) in zip(theirs.curve, ours.curve):
        print(f"{step:>6} {seconds:>9.0f} {accuracy:>9.3f} {our_seconds:>9.0f} {our_accuracy:>9.3f}")
    step = [statistics.median(side.seconds) for side in (theirs, ours)]
    print(f"median seconds a step: torch {step[0]:.1f}, ours {step[1]:.1f}: {step[0] / step[1]:.2f} times as fast")
    goal = [side.to_goal() for side in (theirs, ours)]
    if all(goal):
        print(f"seconds to {GOAL:.2f}: torch {goal[0]:.0f}, ours {goal[1]:.0f}: {goal[0] / goal[1]:.2f} times as fast")
        print(f"from the command, with the start of every process: ours {goal[1] + ours.start:.0f}")
    else:
        print(f"seconds to {GOAL:.2f}: torch {goal[0]}, ours {goal[1]} (None: not within that many steps)")
    sys.stdout.flush()


def main() -> None:
    """Both sides for every seed, and their mean accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--model", default=str(DATA / "SmolLM2-135M-Instruct"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="torch's compute type")
    args, overrides = parser.parse_known_args()
    pairs = []
    for seed in range(1, args.seeds + 1):
        theirs, questions = run_torch(args.model, args.steps, seed, args.dtype)
        ours = run_ours(args.steps, seed, questions, overrides)
        pairs.append((theirs, ours))
        show(theirs, ours)
    if args.seeds > 1:
        for side, name in enumerate(("torch", "ours")):
            curves = [[accuracy for _, _, accuracy in pair[side].curve] for pair in pairs]
            means = ", ".join(f"{statistics.mean(accuracies):.3f}" for accuracies in zip(*curves))
            print(f"mean accuracy over {args.seeds} seeds, {name}: {means}")


if __name__ == "__main__":
    main()
