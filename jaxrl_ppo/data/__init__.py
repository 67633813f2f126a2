"""Prompts from files: rows, chat template, filters, Grain loader, samplers."""

from typing import TYPE_CHECKING, Any

from jaxrl_ppo.data.dataset import RLDataset, create_rl_dataset
from jaxrl_ppo.data.local import LocalCopyError, copy_to_local
from jaxrl_ppo.data.rows import DataError
from jaxrl_ppo.data.sampler import create_rl_sampler
from jaxrl_ppo.data.tokenizer import TokenizerError, hf_processor, hf_tokenizer

if TYPE_CHECKING:
    from jaxrl_ppo.data.stream import PromptStream

__all__ = [
    "DataError",
    "LocalCopyError",
    "PromptStream",
    "RLDataset",
    "TokenizerError",
    "copy_to_local",
    "create_rl_dataset",
    "create_rl_sampler",
    "hf_processor",
    "hf_tokenizer",
]


def __getattr__(name: str) -> Any:
    # Grain imports JAX, which the processes that only tokenise or copy do without.
    if name == "PromptStream":
        from jaxrl_ppo.data.stream import PromptStream

        return PromptStream
    raise AttributeError(name)
