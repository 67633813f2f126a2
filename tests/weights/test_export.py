"""Export from a sharded state: the same tensors as from one device, in buckets, layer by layer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("export_script.py")
ROOT = Path(__file__).parents[2]


def test_export_from_shards_equals_export_from_one_device():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "equal" in result.stdout
