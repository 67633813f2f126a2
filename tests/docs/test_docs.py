"""The documentation is true: its commands run, its error messages exist, its reference is what the schema says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hydra.core.global_hydra import GlobalHydra

from jaxrl_ppo import dry_run, report
from jaxrl_ppo.doctor.files import configuration
from jaxrl_ppo.schema.coerce import walk
from jaxrl_ppo.schema.reference import COMMAND, pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
MAIN = ["python", "-m", "jaxrl_ppo.main"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def commands(page: Path) -> list[list[str]]:
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


@pytest.fixture(scope="module")
def place(quickstart, tmp_path_factory):
    """A folder with what the pages speak of: a checkout's files, data, a model folder, a finished run, their Python."""
    place = tmp_path_factory.mktemp("docs")
    for name in ("examples", ".quickstart", "config"):
        (place / name).symlink_to(ROOT / name)
    rows = pq.read_table(quickstart / "train.parquet").slice(0, 100)
    for name in ("train", "val", "more"):
        pq.write_table(rows, place / f"{name}.parquet")
    model = place / "models/Qwen2.5-7B-Instruct"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(quickstart / "SmolLM2-135M-Instruct" / file, model)
    (place / "models/reward-model").mkdir()
    header = b"{}"
    for folder in (model, place / "models/reward-model"):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    classifier = {"model_type": "qwen2", "id2label": {"0": "LABEL_0"}}
    (place / "models/reward-model/config.json").write_text(json.dumps(classifier))
    (place / "runs/quickstart").mkdir(parents=True)
    (place / "runs/quickstart/metrics.jsonl").write_text('{"step":1,"critic/score/mean":0.5}\n')
    for page in PAGES:
        for block in blocks(page, "python"):
            name = re.match(r"# (\w+\.py)\n", block)
            assert name, f"{page.name}: a Python block must begin with its file's name"
            (place / name[1]).write_text(block)
    return place


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_of_a_page_run(page, place, monkeypatch, capsys):
    """Runs are composed and checked in this process, as a dry run does; other commands are what they are."""
    monkeypatch.chdir(place)
    for command in commands(page):
        if command[:3] == MAIN:
            name, overrides = "ppo_trainer", command[3:]
            if overrides[0] == "--config-name":
                name, overrides = overrides[1], overrides[2:]
            assert "trainer.dry_run=true" in overrides, command
            GlobalHydra.instance().clear()
            findings, config = configuration(name, overrides)
            assert config is not None, (command, [str(finding) for finding in findings])
            assert dry_run.look(config).lines
        elif command[:3] == ["python", "-m", "jaxrl_ppo.report"]:
            assert report.main(command[3:]) == 0
        else:
            assert command[0] in ("python", "bash"), command
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stdout, done.stderr)


def test_the_first_command_as_a_person_types_it(place):
    command, *_ = commands(DOCS / "quickstart.md")
    done = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("dry run: nothing was started\n")


def test_commands_that_are_only_shown_exist():
    """pip's extras and ray's subcommands; a pod cannot be had here."""
    extras = re.findall(r"^(\w[\w-]*) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    shown = [line for page in PAGES for block in blocks(page, "text") for line in block.splitlines() if line.strip()]
    assert shown
    for line in shown:
        if line.startswith("pip install"):
            assert set(re.search(r"\[(.*)\]", line)[1].split(",")) <= set(extras), line
        else:
            assert line.startswith("ray start --"), line
            assert shutil.which("ray", path=str(Path(sys.executable).parent)), line


def test_reference_pages_are_current():
    for name, text in pages():
        assert (DOCS / name).read_text(encoding="utf-8") == text, f"docs/{name} is old: {COMMAND}"


def test_messages_of_the_troubleshooting_page_are_the_codes():
    files = [*(ROOT / "jaxrl_ppo").rglob("*.py"), *(ROOT / "device").rglob("*.py")]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # one message over several lines
    messages = re.findall(r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(messages) > 20
    assert [message for message in messages if message not in code] == []


def test_keys_and_links_in_the_text_exist():
    keys = {path for path, _, _ in walk()}
    sections = {path.rsplit(".", depth)[0] for path in keys for depth in range(1, path.count(".") + 1)}
    roots = {path.split(".")[0] for path in keys}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page.name != "verl_keys.md":  # which is about keys that are not ours
            for word in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", text):
                if word.split(".")[0] in roots and not word.endswith((".py", ".json", ".jsonl", ".yaml")):
                    assert word in keys | sections, f"{page.name}: {word}"
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
