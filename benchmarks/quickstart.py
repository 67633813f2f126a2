"""The quickstart against the plain torch loop, one after the other: seconds a step, and seconds to an accuracy of 0.70.

    python benchmarks/quickstart.py [--steps 20] [--dtype float32] [key=value …]

Both train the same model on the same task with batches of the same size, and validate every five steps on the same 64
held-out questions. Clocks start when the model is ready, before the first validation; ours includes compilation, and
`from the command` also the start of Ray and of every process. Further arguments are overrides of the quickstart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxrl_ppo.observability.run_folder import read_metrics
from jaxrl_ppo.observability.timeline import read_spans

HERE = Path(__file__).parent
GOAL = 0.70


def run_torch(model: str, steps: int, dtype: str) -> dict:
    command = [sys.executable, HERE / "torch_grpo.py", model, "--steps", str(steps), "--dtype", dtype]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {
        "seconds": [line["seconds"] for line in lines if "seconds" in line],
        "curve": [(line["step"], line["elapsed"], line["accuracy"]) for line in lines if "accuracy" in line],
    }


def run_ours(steps: int, overrides: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxrl_ppo.main", "--config-name", "quickstart", *overrides]
        settings = [f"trainer.default_local_dir={folder}/run", f"trainer.total_training_steps={steps}"]
        launched = time.time()
        subprocess.run([*command, *settings], check=True, cwd=HERE.parent)
        rows = {row["step"]: row for row in read_metrics(Path(folder, "run"))}
        validations = [s for s in read_spans(Path(folder, "run", "timeline.json")) if s.track == "validation"]
    begin = min(span.start for span in validations)
    curve = [
        (span.step, span.end - begin, next(v for k, v in rows[span.step].items() if k.startswith("val-core/")))
        for span in validations
    ]
    seconds = [rows[step]["timing_s/step"] - rows[step].get("timing_s/testing", 0) for step in range(1, steps + 1)]
    return {"seconds": seconds, "curve": curve, "start": begin - launched}


def to_goal(curve: list) -> float | None:
    return next((elapsed for _, elapsed, accuracy in curve if accuracy >= GOAL), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default=".quickstart/SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="torch's compute type")
    args, overrides = parser.parse_known_args()
    ours = run_ours(args.steps, overrides)
    theirs = run_torch(args.model, args.steps, args.dtype)

    print(f"{'step':>6} {'torch s':>9} {'accuracy':>9} {'ours s':>9} {'accuracy':>9}")
    for (step, seconds, accuracy), (_, our_seconds, our_accuracy) in zip(theirs["curve"], ours["curve"]):
        print(f"{step:>6} {seconds:>9.0f} {accuracy:>9.3f} {our_seconds:>9.0f} {our_accuracy:>9.3f}")
    step = [statistics.median(side["seconds"]) for side in (theirs, ours)]
    print(f"median seconds a step: torch {step[0]:.1f}, ours {step[1]:.1f}: {step[0] / step[1]:.2f} times as fast")
    goal = [to_goal(side["curve"]) for side in (theirs, ours)]
    if all(goal):
        print(f"seconds to {GOAL:.2f}: torch {goal[0]:.0f}, ours {goal[1]:.0f}: {goal[0] / goal[1]:.2f} times as fast")
        print(f"from the command, with the start of every process: ours {goal[1] + ours['start']:.0f}")
    else:
        print(f"seconds to {GOAL:.2f}: torch {goal[0]}, ours {goal[1]} (None: not within {args.steps} steps)")


if __name__ == "__main__":
    main()
