"""The schema is read by every process, so it may not pull in anything heavy."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("jax", "flax", "numpy", "ray", "hydra", "omegaconf", "torch", "pyarrow", "transformers", "yaml")


def test_schema_imports_nothing_heavy() -> None:
    code = "import sys, jaxrl_ppo.schema.validate, jaxrl_ppo.schema.table, device; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {name.split(".")[0] for name in loaded} & set(HEAVY)
