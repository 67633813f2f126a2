"""Fixtures that several parts share: the quickstart's real model and data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray's workers give way to every other process by default: a run would starve beside the other half of the tests.
os.environ.setdefault("RAY_worker_niceness", "0")
# Many tests, and the processes that they start, need the same programs.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


@pytest.fixture(scope="session")
def quickstart() -> Path:
    """The folder with the quickstart's model and data files; prepared here when `make` has not done so yet."""
    folder = ROOT / ".quickstart"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, ROOT / "examples/quickstart/prepare.py"], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="session")
def smollm2(quickstart: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder."""
    return quickstart / "SmolLM2-135M-Instruct"
