"""A campaign of injected faults over short runs: which end properly, which stop with the right cause, and what is lost.

    python benchmarks/faults.py [--list] [--only NAME …] [--rounds 1] [--seed 0] [--base FOLDER] [--results FILE]

Each scenario starts the command with a tiny model, hurts it, and judges what it left in its folder: every sample
trained once (in order, where the mode has an order) with the reward of its text, every step in the metrics, every
fault visible in them, the last checkpoint committed, no process left over; and, where what was hurt has no part in the
arithmetic, the same samples and to the bit the same parameters as in a run that nobody disturbed. Results are added to
a file, so that the campaign can be run in slices; `--table` prints the table of what the file holds.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import random
import tempfile
import time
from pathlib import Path

from fault_runs import Hang, prepare
from fault_scenarios import SCENARIOS
from fault_verdicts import Scenario, Verdict


def main() -> None:
    """Run the scenarios that are asked for, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the scenarios")
    parser.add_argument("--only", nargs="+", default=list(SCENARIOS), help="parts of the names of those to run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", type=Path, help="keep the runs in this folder, for a look or for the next slice")
    parser.add_argument("--results", type=Path, default=Path("runs/faults.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table of the results and stop")
    args = parser.parse_args()
    if args.list:
        print("\n".join(SCENARIOS))
    elif args.table:
        print(table(args.results))
    else:
        chosen = [name for name in SCENARIOS if any(part in name for part in args.only)]
        with contextlib.ExitStack() as stack:
            base = args.base or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if not (base / "model").exists():
                prepare(base)
            for number in range(args.rounds):
                for name in chosen:
                    seed = args.seed + number
                    scenario = Scenario(base, random.Random(f"{seed} {name}"))
                    begin = time.monotonic()
                    try:
                        SCENARIOS[name](scenario)
                    except Hang as hang:
                        scenario.verdict.blame("hangs", [str(hang)])
                    finally:
                        scenario.close()
                    add(args.results, name, seed, time.monotonic() - begin, scenario.verdict)
        print(table(args.results))


def add(results: Path, name: str, seed: int, seconds: float, verdict: Verdict) -> None:
    """A scenario's verdict into the file of results."""
    row = {"scenario": name, "seed": seed, "seconds": round(seconds), **dataclasses.asdict(verdict)}
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def table(results: Path) -> str:
    """The results as Markdown, a line for each scenario."""
    columns = ("injected", "ended", "stopped", "hangs", "lost_prompts", "silent_errors")
    sums: dict[str, collections.Counter[str]] = {}
    for line in results.read_text().splitlines():
        row = json.loads(line)
        counts = {column: row[column] for column in columns}
        sums.setdefault(row["scenario"], collections.Counter()).update(counts)
    total = sum(sums.values(), collections.Counter())
    lines = [
        "| fault | injected | runs that ended properly | stopped, right cause | hangs | lost prompts | silent errors |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in [*sums.items(), ("**all**", total)]:
        lines.append(f"| {name} | " + " | ".join(str(row[column]) for column in columns) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
