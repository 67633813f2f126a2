"""Prompts from files: rows, chat template, filters, Grain loader, samplers."""

from jaxrl_ppo.data.dataset import RLDataset, create_rl_dataset
from jaxrl_ppo.data.local import LocalCopyError, copy_to_local
from jaxrl_ppo.data.rows import DataError
from jaxrl_ppo.data.sampler import create_rl_sampler
from jaxrl_ppo.data.stream import PromptStream
from jaxrl_ppo.data.tokenizer import TokenizerError, hf_processor, hf_tokenizer

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
