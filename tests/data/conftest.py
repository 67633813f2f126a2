"""A real tokenizer, trained here on a few sentences, and the data section of a configuration."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxrl_ppo.data.tokenizer import hf_tokenizer
from jaxrl_ppo.schema.config import DataConfig

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = ["What is 3 + 4? Answer with the number only.", "user assistant system", "the quick brown fox jumps"] * 20


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRL_PPO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A folder as Hugging Face lays out tokenizers: byte-level BPE with ChatML."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    return hf_tokenizer(model_folder)


@pytest.fixture
def data_config():
    def make(**keys):
        return DataConfig(**{"max_prompt_length": 128, "train_batch_size": 4} | keys)

    return make
