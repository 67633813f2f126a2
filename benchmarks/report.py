"""The report of a long run: how long it takes to write, and to open in a real headless Chromium.

    python benchmarks/report.py --steps 200 --samples 512 --pictures shots/

Needs Chromium on the path. The run's numbers are made up; its files are as a run writes them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/observability"))
from browser import tab
from run_folders import write_run

from jaxrl_ppo.report import main as write_report

# Notes when the first view is drawn.
NOTE = """
    const noting = setInterval(() => {
        if (document.querySelector("#overview td")) { window.firstView = performance.now(); clearInterval(noting); }
    }, 5);
"""
# Both moments: the first view, and every view drawn, the list of samples and one sample's text included.
OPEN = """
    const until = async (what) => {
        for (;;) { const found = what(); if (found) return found; await new Promise((done) => setTimeout(done, 5)); }
    };
    for (const link of document.querySelectorAll("nav a")) link.click();
    const row = await until(() => document.querySelector("#samples tbody tr"));
    row.click();
    await until(() => document.querySelector("#samples .token"));
    return [window.firstView, performance.now()];
"""


async def look(page: Path, profile: Path, pictures: Path | None) -> tuple[float, float]:
    """Seconds from the start of the navigation to the first view, and to all of them."""
    async with tab(profile) as browser:
        await browser.open(page, NOTE)
        first, everything = await browser.evaluate(OPEN)
        for section in ("overview", "curves", "time", "distributions", "samples", "configuration"):
            if pictures:
                await browser.evaluate(f"document.getElementById('{section}').scrollIntoView(); return 0")
                await asyncio.sleep(0.5)
                await browser.screenshot(pictures / f"{section}.png")
    return first / 1e3, everything / 1e3


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--pictures", type=Path, help="a folder for a screenshot of each view")
    args = parser.parse_args()
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder, "run"), steps=args.steps, samples=args.samples)
        started = time.perf_counter()
        write_report([str(run)])
        print(f"written in {time.perf_counter() - started:.1f} s")
        first, everything = asyncio.run(look(run / "report.html", Path(folder, "profile"), args.pictures))
    print(f"opened: first view after {first:.2f} s, every view and a sample's text after {everything:.2f} s")


if __name__ == "__main__":
    main()
