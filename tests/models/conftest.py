"""Folders of tiny random models for the model tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import CONFIGS, make_model


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of each family variant, float32, one safetensors file."""
    folders = {}
    for name in CONFIGS:
        folders[name] = tmp_path_factory.mktemp("models") / name
        make_model(name).save_pretrained(folders[name])
    return folders
