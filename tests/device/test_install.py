"""What is said of how to install an extra, against pip's own reading of it and the records that pip leaves."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from device import install, pip_install

WHEEL = "https://example.org/jaxrl_ppo-1-py3-none-any.whl"


def test_from_a_clone() -> None:
    command, option, where = shlex.split(pip_install("cuda", "vllm"))[1:]
    folder, _, extras = where.partition("[")
    assert (command, option, extras) == ("install", "-e", "cuda,vllm]")
    assert 'name = "jaxrl-ppo"' in (Path(folder) / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("record", "address"),
    [
        ({"url": WHEEL, "archive_info": {}}, WHEEL),
        ({"url": "file:///home/me/jaxrl", "dir_info": {}}, "file:///home/me/jaxrl"),
        (
            {"url": "https://example.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "git+https://example.org/a.git@abc",
        ),
        (None, None),  # pip leaves none for what is from an index
    ],
)
def test_installed_it_is_from_where_pip_had_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record: dict[str, Any] | None, address: str | None
) -> None:
    folder = tmp_path / "jaxrl_ppo-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxrl-ppo\nVersion: 1\n")
    if record:
        (folder / "direct_url.json").write_text(json.dumps(record))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(install, "CLONE", tmp_path)
    *command, asked = shlex.split(pip_install("tpu"))
    assert command == ["pip", "install"]
    requirement = Requirement(asked)
    assert (requirement.name, requirement.extras, requirement.url) == ("jaxrl-ppo", {"tpu"}, address)
