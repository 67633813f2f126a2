"""Fixtures of the training tests: a tiny model's folder and its transformers twin."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from torch_oracle import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama with tied embeddings, float32."""
    return save_tiny_model(tmp_path_factory.mktemp("training") / "tiny")


@pytest.fixture
def torch_model(tiny_model: Path) -> transformers.PreTrainedModel:
    """The same model in transformers, without gradients."""
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
