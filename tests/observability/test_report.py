"""The report: self-contained, well-formed, safe with hostile text, complete as to samples, honest on bad input."""

import base64
import gzip
import html.parser
import json
import re

import numpy as np
import pytest

from jaxrl_ppo.observability.run_folder import RunFolder
from jaxrl_ppo.observability.samples import SampleWriter
from jaxrl_ppo.observability.timeline import Timeline
from jaxrl_ppo.report import main

HOSTILE = "</script><script>alert('@chunks@')</script><img src=x>"
VOID = {"meta", "link", "input", "img", "br", "hr"}


class Page(html.parser.HTMLParser):
    """Collects scripts by id and checks that every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.scripts, self.sections, self.references = [], {}, [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.references += [value for name, value in attributes.items() if name in ("src", "href")]
        if tag not in VOID:
            self.open.append((tag, attributes.get("id")))
        if tag == "section":
            self.sections.append(attributes["id"])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "script":
            self.scripts[self.open[-1][1]] = data


@pytest.fixture
def run(tmp_path, batch, samples):
    """Three steps, the second validated and with a fault; a sample's text tries to break out of the page."""
    folder = RunFolder(tmp_path / "run")
    folder.start(config_yaml=f"trainer:\n  project_name: '{HOSTILE}'\n", resume_step=None)
    samples[0].text = HOSTILE
    batch.old_log_probs = batch.rollout_log_probs + np.float32(0.25)
    timeline, writer = Timeline(folder.timeline), SampleWriter(folder.samples, lambda ids: "é" * len(ids))
    for step in (1, 2, 3):
        folder.write_metrics(step, {"critic/score/mean": step / 3, "actor/grad_norm": float("nan"), "name": "text"})
        timeline.event("generation", 10.0 * step, 10.0 * step + 4, step=step, track="generation/0")
        writer.write_rollout(step, batch, samples)
    writer.write_validation(2, batch.prompts, samples[:2])
    timeline.instant("replica 0 replaced", step=2)
    timeline.flush()
    return folder.path


def report(*arguments):
    assert main([str(argument) for argument in arguments]) == 0


def read(path):
    page = Page(path.read_text(encoding="utf-8"))
    return page, json.loads(page.scripts["data"])


def rows_of(page, run, file):
    return json.loads(gzip.decompress(base64.b64decode(page.scripts[f"chunk-{run}-{file}"])))


def column(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype).tolist()


def test_one_file_that_needs_no_other(run):
    report(run)
    text = (run / "report.html").read_text(encoding="utf-8")
    page, _ = read(run / "report.html")
    assert page.sections == ["overview", "curves", "time", "distributions", "samples", "configuration"]
    assert all(reference.startswith("#") for reference in page.references)
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "alert('@chunks@')</script>" not in text
    script = page.scripts[None]
    assert "import " not in script
    assert "fetch(" not in script


def test_curves_spans_and_marks(run):
    report(run)
    _, (data,) = read(run / "report.html")
    assert data["steps"] == [1, 2, 3]
    assert data["metrics"] == {"critic/score/mean": [0.333333, 0.666667, 1.0]}
    assert data["spans"]["start"] == [0, 10_000, 20_000]
    assert data["spans"]["length"] == [4000, 4000, 4000]
    assert data["spans"]["tracks"] == ["generation/0"]
    assert [(mark["name"], mark["step"]) for mark in data["spans"]["marks"]] == [("replica 0 replaced", 2)]
    assert HOSTILE in data["config"]


def test_every_sample_counts_and_can_be_read(run):
    report(run)
    page, (data,) = read(run / "report.html")
    assert [(file["kind"], file["step"], file["rows"], file["kept"]) for file in data["files"]] == [
        ("rollout", 1, 4, 4), ("rollout", 2, 4, 4), ("validation", 2, 2, 2), ("rollout", 3, 4, 4),
    ]  # fmt: skip
    assert column(data["reward"], "<f4")[:4] == [0.5, 0.5, 1.0, 0.0]
    assert column(data["length"], "<u4")[:4] == [2, 4, 3, 0]
    assert [data["sources"][number] for number in column(data["source"], "<u2")[:4]] == ["sums", "sums"] + [
        "products"
    ] * 2
    assert column(data["ordinal"], "<u4")[:4] == [7, 7, 8, 8]
    rows = rows_of(page, 0, 1)
    assert (rows[0]["q"], rows[2]["q"]) == ("a", "b")
    assert rows[0]["r"] == HOSTILE
    assert rows[1]["t"] == ["é"] * 4
    assert rows[1]["d"] == [0.25] * 4
    assert rows[1]["v"] == [[3, 2], [4, 2]]
    assert rows[2]["m"] == [[1, 1], [0, 1], [1, 1]]


def test_texts_are_cut_to_the_budget_but_still_count(run):
    report(run, "--megabytes", "0")
    page, (data,) = read(run / "report.html")
    assert [file["kept"] for file in data["files"]] == [0, 0, 0, 0]
    assert rows_of(page, 0, 0) == []
    assert len(column(data["reward"], "<f4")) == 14


def test_runs_side_by_side_are_told_apart_by_their_paths(run, tmp_path):
    other = tmp_path / "other" / "run"
    RunFolder(other).start(config_yaml="", resume_step=None)
    RunFolder(other).metrics.write_text('{"step":1,"critic/score/mean":1.0}\n')
    report(run, other, "-o", tmp_path / "both.html")
    page, data = read(tmp_path / "both.html")
    assert [one["name"] for one in data] == [f"{tmp_path.name}/run", "other/run"]
    assert data[1]["files"] == []
    assert "chunk-0-3" in page.scripts


def test_folders_without_a_readable_run_are_left_out_and_named(run, tmp_path, capsys):
    empty, other = tmp_path / "nowhere", tmp_path / "broken"
    RunFolder(other).start(config_yaml="", resume_step=None)
    RunFolder(other).write_metrics(1, {"critic/score/mean": 1.0})
    (other / "samples" / "rollout_000001.jsonl").write_text("{}\n{}\n")
    report(empty, run, other)
    told = capsys.readouterr()
    assert told.out.startswith(f"{run}/report.html: 1 run(s)")
    first, second = told.err.splitlines()
    assert first.startswith(f"warning: left out: {empty}: no run here (no metrics.jsonl)")
    assert second.startswith(f"warning: left out: {other}: a file of the run cannot be read")
    _, data = read(run / "report.html")
    assert [one["name"] for one in data] == ["run"]
    assert main([str(empty), str(other)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert [line.split(":")[0] for line in told.err.splitlines()] == ["error", "error"]
