"""python -m jaxrl_ppo.report RUN [RUN ...]: writes one HTML file that shows the runs in these folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_ppo.observability.files import write_atomically
from jaxrl_ppo.observability.report.collect import ReportError, collect_run
from jaxrl_ppo.observability.report.page import render


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 where a folder holds no readable run."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_ppo.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder (trainer.default_local_dir)")
    parser.add_argument("-o", "--output", type=Path, help="the file to write; default: report.html in the first folder")
    parser.add_argument(
        "--megabytes", type=int, default=48, help="most that sample texts may take (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    folders = [Path(folder) for folder in options.runs]
    try:
        budget = options.megabytes * 1_000_000 // len(folders)
        runs = [collect_run(folder, name, sample_bytes=budget) for folder, name in zip(folders, _names(folders))]
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output = options.output or folders[0] / "report.html"
    write_atomically(output, render(runs, ", ".join(_names(folders))))
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
