"""The report in a real Chromium: every view draws, samples open, and nothing in the page fails."""

from __future__ import annotations

from browser import tab
from PIL import Image
from run_folders import write_run

from jaxrl_ppo.report import main

# Scrolls through the page, so that every section draws itself, and opens the first sample.
LOOK = """
    window.failures = [];
    addEventListener("error", (event) => failures.push(event.message));
    addEventListener("unhandledrejection", (event) => failures.push(String(event.reason)));
    const until = async (what) => {
        for (;;) { const found = what(); if (found) return found; await new Promise((done) => setTimeout(done, 20)); }
    };
    for (const link of document.querySelectorAll("nav a")) link.click();
    const row = await until(() => document.querySelector("#samples tbody tr"));
    const asked = row.querySelector("td.words");
    await until(() => asked.textContent !== "…");
    row.click();
    await until(() => document.querySelector("#samples .token"));
    return {
        failures,
        words: document.body.innerText,
        asked: asked.textContent,
        outside: [...document.querySelectorAll("#samples .token.outside")].length,
        charts: [...document.querySelectorAll("#curves svg")].length,
        phases: [...document.querySelectorAll("#time svg rect")].length,
        resumed: ["curves", "time"].map((part) => [...document.querySelectorAll(`#${part} svg`)]
            .map((svg) => [...svg.querySelectorAll(".resumed")].map((line) => Number(line.getAttribute("x1"))))),
        bars: [...document.querySelectorAll("#time svg g")].map((bar) => bar.getBBox())
            .map((box) => [box.x, box.x + box.width]),
        histograms: [...document.querySelectorAll("#distributions svg")].length,
    };
"""


async def test_every_view_of_two_runs_side_by_side(tmp_path):
    """Numbers of the page against those that went in; the picture is not empty."""
    first = write_run(tmp_path / "first", steps=12, samples=16, resumed_after=(4,))
    second = write_run(tmp_path / "second", steps=6, samples=16, seed=1, resumed_after=(2, 3))
    assert main([str(first), str(second), "-o", str(tmp_path / "both.html")]) == 0
    async with tab(tmp_path / "profile") as page:
        await page.open(tmp_path / "both.html")
        seen = await page.evaluate(LOOK)
        await page.screenshot(tmp_path / "page.png")
    assert seen["failures"] == []
    assert seen["asked"] == "What is 12 + 1?"  # without the chat template
    assert seen["charts"] >= 6
    assert seen["phases"] > 20
    assert seen["histograms"] >= 4
    curves, (bars, timeline) = seen["resumed"]
    assert max(map(len, curves)) == 3  # those of both runs
    (at,) = bars  # of the first run, whose phases are shown, between its fourth and its fifth step
    assert seen["bars"][3][1] < at < seen["bars"][4][0]
    assert len(timeline) == 0  # of which four steps from the middle are shown
    assert seen["outside"] == 8  # a tool's tokens are told apart
    for words in (
        "first",
        "second",
        "What differs",
        "192 samples",
        "idle share of the trainer",
        "What the reward function said",
        "3 turns, 1 by tools",
        "weight version 0",
        "tool",
        "after step 4, 2001-09-09 01:47 UTC",
        "2 times, last after step 3, 2001-09-09 01:47 UTC",
        "resumes of second",
    ):
        assert words in seen["words"], words
    with Image.open(tmp_path / "page.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 50
