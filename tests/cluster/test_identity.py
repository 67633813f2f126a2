"""A checkpoint goes on with the model and the vocabulary that it was made with, and with no other."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxrl_ppo.cluster.identity import check_identity, identity
from jaxrl_ppo.pipeline.checkpoints import CheckpointError

SIZES = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


@dataclasses.dataclass
class Tokenizer:
    """What identity reads of a tokenizer."""

    vocabulary: tuple[str, ...] = ("a", "b")
    eos_token_id: int = 1
    chat_template: str = "{{ messages }}"

    def get_vocab(self):
        return {token: i for i, token in enumerate(self.vocabulary)}


def make_folder(path, weight=0.0, **sizes):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SIZES | sizes))
    save_file({"x": np.full(4, weight, np.float32)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            SimpleNamespace(folder={"num_hidden_layers": 2}),
            r"the model is not the checkpoint's: num_layers was 1 and is 2",
        ),
        (SimpleNamespace(folder={"weight": 1.0}), r"the model is not the checkpoint's: weights was \w+ and is \w+"),
        (SimpleNamespace(tokenizer={"vocabulary": ("b", "a")}), r"the vocabulary is not the checkpoint's: tokens was"),
        (SimpleNamespace(tokenizer={"eos_token_id": 0}), r"end token was 1 and is 0"),
        (SimpleNamespace(tokenizer={"chat_template": "{{ x }}"}), r"chat template was"),
    ],
)
def test_another_model_or_vocabulary_is_refused_with_what_differs(tmp_path, change, told):
    saved = identity(make_folder(tmp_path / "saved"), Tokenizer())
    check_identity(saved, identity(make_folder(tmp_path / "copy"), Tokenizer()))
    folder = make_folder(tmp_path / "other", **getattr(change, "folder", {}))
    current = identity(folder, Tokenizer(**getattr(change, "tokenizer", {})))
    with pytest.raises(CheckpointError, match=told + r".*trainer\.resume_mode=disable"):
        check_identity(saved, current)
