"""Reward functions in files, as a user writes them, and managers that run them."""

import contextlib
import textwrap

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl_ppo.rewards import RewardManager
from jaxrl_ppo.rewards.process import RewardProcess
from jaxrl_ppo.schema.config import Config


@pytest.fixture(scope="session")
def tokenizer():
    """One token a byte, and an end token that decoding drops."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


@pytest.fixture
def function_file(tmp_path):
    def write(source, name="reward.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


@pytest.fixture
def started(tokenizer):
    """Context of a started manager with a reward function file and keys of `reward`."""

    @contextlib.asynccontextmanager
    async def manager(path=None, *, name="compute_score", arguments=None, sources=(), **keys):
        config = Config()
        config.reward.num_workers = 2
        config.reward.custom_reward_function.path = path
        config.reward.custom_reward_function.name = name
        config.reward.custom_reward_function.reward_kwargs = arguments or {}
        for key, value in keys.items():
            setattr(config.reward, key, value)
        manager = RewardManager(config, tokenizer)
        try:
            await manager.start(sources)
            yield manager
        finally:
            await manager.close()

    return manager


@pytest.fixture
def patient(monkeypatch):
    """The deadline is for the calls that hang; others have all the time that a busy machine takes for them."""
    call = RewardProcess.call

    async def deadline_where_it_hangs(process, one, timeout_s):
        return await call(process, one, timeout_s if one.solution_str in ("hang", "sleep", "block") else 600)

    monkeypatch.setattr(RewardProcess, "call", deadline_where_it_hangs)
