"""python -m jaxrl_ppo.report RUN [RUN ...]: writes one HTML file that shows the runs in these folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_ppo.observability.files import write_atomically
from jaxrl_ppo.observability.report.collect import ReportError, RunData, collect_run
from jaxrl_ppo.observability.report.page import render


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where none of the folders holds a readable run; those that do not are named."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_ppo.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder (trainer.default_local_dir)")
    parser.add_argument("-o", "--output", type=Path, help="the file to write; default: report.html in the first run")
    parser.add_argument(
        "--megabytes", type=int, default=48, help="most that sample texts may take (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    folders = [Path(folder) for folder in options.runs]
    budget = options.megabytes * 1_000_000 // len(folders)
    runs: dict[Path, RunData] = {}
    faults: list[ReportError] = []
    for folder, name in zip(folders, _names(folders)):
        try:
            runs[folder] = collect_run(folder, name, sample_bytes=budget)
        except ReportError as error:
            faults.append(error)
    for fault in faults:
        print(f"warning: left out: {fault}" if runs else f"error: {fault}", file=sys.stderr)
    if not runs:
        return 1
    output = options.output or next(iter(runs)) / "report.html"
    write_atomically(output, render(list(runs.values()), ", ".join(run.summary["name"] for run in runs.values())))
    print(f"{output}: {len(runs)} run(s), {output.stat().st_size / 1e6:.1f} MB")
    return 0


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of the path before them as tells them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


if __name__ == "__main__":
    sys.exit(main())
