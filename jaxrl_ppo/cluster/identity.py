"""What a run is made of, in a few numbers that its checkpoints carry: a resume with another model is refused."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_ppo.models.config import load_decoder_config
from jaxrl_ppo.pipeline.checkpoints import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLED_BYTES = 1 << 20  # of both ends of a weight file: reading a whole model again would take minutes


def identity(model_folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, dict[str, Any]]:
    """The model's sizes and weights, the vocabulary and the chat template, as plain data.

    Weight files count by name, size and both ends. Raises ModelFolderError for a folder that is none.
    """
    folder = Path(model_folder)
    weights = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        weights.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            weights.update(content.read(SAMPLED_BYTES))
            content.seek(max(size - SAMPLED_BYTES, 0))
            weights.update(content.read(SAMPLED_BYTES))
    vocabulary = sorted(tokenizer.get_vocab().items())
    return {
        "model": dataclasses.asdict(load_decoder_config(folder)) | {"weights": weights.hexdigest()[:16]},
        "vocabulary": {
            "entries": len(vocabulary),
            "tokens": _digest(repr(vocabulary)),
            "end token": tokenizer.eos_token_id,
            "chat template": _digest(str(tokenizer.chat_template)),
        },
    }


def check_identity(saved: Mapping[str, Mapping[str, Any]], current: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise CheckpointError, with all that differs, when a checkpoint's identity is not the run's."""
    faults = [
        f"the {part} is not the checkpoint's: " + "; ".join(differences)
        for part in current
        if (differences := list(_differences(saved[part], current[part], "")))
    ]
    if faults:
        raise CheckpointError(
            ". ".join(faults) + ". Resume with the same actor_rollout_ref.model.*, or start anew with "
            "trainer.resume_mode=disable"
        )


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any], path: str) -> Iterator[str]:
    for name in sorted(saved.keys() | current.keys()):
        old, new = saved.get(name), current.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{path}{name}.")
        elif old != new:
            yield f"{path}{name} was {old} and is {new}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
