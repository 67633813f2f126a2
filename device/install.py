"""How an extra of this package is installed here; the package is on no index."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

PACKAGE = "jaxrl-ppo"
CLONE = Path(__file__).resolve().parents[1]


def pip_install(*extras: str) -> str:
    """The command that adds the extras: from the clone that this runs from, else from where it was installed from.

    The latter is in the installation's record, direct_url.json (PEP 610): a wheel, a folder or a repository.
    """
    asked = f"[{','.join(extras)}]"
    if (CLONE / "pyproject.toml").is_file():
        return f"pip install -e '{CLONE}{asked}'"
    try:
        record = distribution(PACKAGE).read_text("direct_url.json")
    except PackageNotFoundError:
        record = None
    source = f" @ {_address(json.loads(record))}" if record else ""  # without, it came from an index of the user's own
    return f"pip install '{PACKAGE}{asked}{source}'"


def _address(record: dict[str, Any]) -> str:
    """Of a direct_url.json, as pip takes it in a requirement."""
    if "vcs_info" in record:
        return f"{record['vcs_info']['vcs']}+{record['url']}@{record['vcs_info']['commit_id']}"
    return str(record["url"])
