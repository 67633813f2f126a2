"""Puts runs into one HTML file with its styles and scripts inside, so that it opens anywhere, offline."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib import resources

from jaxrl_ppo.observability.report.collect import RunData

SCRIPTS = ("core.js", "charts.js", "overview.js", "time.js", "distributions.js", "samples.js", "start.js")


def render(runs: Sequence[RunData], title: str) -> str:
    """The page as text. Sample chunks come after the script, so that the page is drawn before they are parsed."""
    files = resources.files("jaxrl_ppo.observability.report")
    script = "\n".join((files / "page" / name).read_text(encoding="utf-8") for name in SCRIPTS)
    data = json.dumps([run.summary for run in runs], ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    parts = {
        "title": html.escape(title),
        "style": (files / "page" / "page.css").read_text(encoding="utf-8"),
        "script": f'(() => {{\n"use strict";\n{script}\n}})();',
        "data": data.replace("<", "\\u003c"),
        "chunks": "\n".join(
            f'<script type="text/plain" id="chunk-{number}-{file}">{chunk}</script>'
            for number, run in enumerate(runs)
            for file, chunk in enumerate(run.chunks)
        ),
    }
    page = (files / "page" / "page.html").read_text(encoding="utf-8")
    return re.sub("@([a-z]+)@", lambda mark: parts[mark[1]], page)
