"""From a Hugging Face model folder to a `DecoderConfig`, with errors that say which file and key is at fault."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxrl_ppo.models.architecture import DecoderConfig, RopeConfig
from jaxrl_ppo.models.families import FAMILIES
from jaxrl_ppo.models.families.family import token_ids

__all__ = ["DecoderConfig", "ModelFolderError", "RopeConfig", "load_decoder_config"]


class ModelFolderError(ValueError):
    """A model folder that cannot be used: missing, malformed or of an unknown architecture."""


def load_decoder_config(folder: str | Path, head: str = "lm") -> DecoderConfig:
    """Read `config.json` (and `generation_config.json` for end tokens) of a Hugging Face model folder.

    `head` is what is to stand on the decoder (see HEADS), whatever the folder's own head is.
    Raises ModelFolderError naming the file and key when the folder or a file is missing or malformed, or when no
    family here knows its `model_type`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelFolderError(f"model folder {folder} does not exist; give a local Hugging Face folder or a model id")
    raw = read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelFolderError(f"{folder / 'config.json'}: model_type {model_type!r} is not supported; known: {known}")
    try:
        family = FAMILIES[model_type]
        biased = head == "value" and family.token_classifier
        config = dataclasses.replace(family.read(raw), head=head, head_bias=biased)
    except KeyError as error:
        raise ModelFolderError(f"{folder / 'config.json'}: key {error} is missing") from error
    except (TypeError, ValueError) as error:
        raise ModelFolderError(f"{folder / 'config.json'}: {error}") from error
    generation = folder / "generation_config.json"
    if generation.exists():
        eos = token_ids(read_json(generation).get("eos_token_id"))
        config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + eos)))
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelFolderError, naming the file, when there is none."""
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path} is missing: not a Hugging Face model folder") from error
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(body, dict):
        raise ModelFolderError(f"{path} must hold a JSON object, not {type(body).__name__}")
    return body
