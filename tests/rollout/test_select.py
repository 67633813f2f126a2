"""Which engine a configuration gets, with and without vLLM installed."""

import subprocess
import sys

import pytest

from jaxrl_ppo.rollout import select


@pytest.mark.parametrize(
    ("name", "installed", "expected"),
    [
        ("auto", True, "vllm"),
        ("auto", False, "jax"),
        ("vllm", True, "vllm"),
        ("jax", True, "jax"),
        ("jax", False, "jax"),
    ],
)
def test_engine_name_is_resolved(monkeypatch, name, installed, expected):
    monkeypatch.setattr(select, "find_spec", lambda module: object() if installed and module == "vllm" else None)
    assert select.resolve_engine_name(name) == expected


def test_missing_vllm_says_what_to_install(monkeypatch):
    monkeypatch.setattr(select, "find_spec", lambda module: None)
    with pytest.raises(ImportError, match=r"rollout\.name=vllm.*pip install .*\[vllm\].*rollout\.name=jax"):
        select.resolve_engine_name("vllm")


def test_looking_for_vllm_imports_nothing():
    code = (
        "import sys, jaxrl_ppo.rollout.router, jaxrl_ppo.rollout.select as select\n"
        "select.resolve_engine_name('auto'); print([m for m in ('vllm', 'torch', 'ray', 'jax') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
