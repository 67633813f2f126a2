"""Hugging Face folders out: sharded safetensors with an index, the configuration and the tokenizer's files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxrl_ppo.models.families import FAMILIES

# What travels from the folder that the model came from: everything but weights and what the weights decide.
NOT_COPIED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.gguf",
    "config.json",
    "prepared.json",
)


def save_pretrained(
    folder: str | Path, buckets: Iterable[Mapping[str, np.ndarray]], source: str | Path, head: str = "lm"
) -> None:
    """Write checkpoint tensors as a Hugging Face folder, loadable by transformers and vLLM.

    `buckets` are (name -> array) mappings in Hugging Face names, each written as one file as it comes: the host holds
    one at most. `source` is the folder the model was read from; its configuration (with the tensors' dtype) and its
    tokenizer files are taken over. With `head` "value" or "sequence" the configuration says that it is a token or
    sequence classifier of one label. The folder appears whole or not at all: an existing one is replaced at the end.
    """
    folder, source = Path(folder), Path(source)
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, ignore=shutil.ignore_patterns(*NOT_COPIED, ".*"))
    places: list[list[str]] = []
    total = 0
    dtype = "float32"
    for bucket in buckets:
        part = temporary / f"part-{len(places)}"
        save_file(dict(bucket), part, metadata={"format": "pt"})
        part.chmod((source / "config.json").stat().st_mode & 0o777)  # safetensors makes it the owner's alone
        places.append(list(bucket))
        total += sum(array.nbytes for array in bucket.values())
        dtype = next(iter(bucket.values())).dtype.name
    if len(places) == 1:
        os.rename(temporary / "part-0", temporary / "model.safetensors")
    else:
        files = [f"model-{i + 1:05d}-of-{len(places):05d}.safetensors" for i in range(len(places))]
        for i, file in enumerate(files):
            os.rename(temporary / f"part-{i}", temporary / file)
        weight_map = {name: file for names, file in zip(places, files) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config |= {"dtype": dtype}
    if head != "lm":
        label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        config |= {"architectures": [FAMILIES[config["model_type"]].classifier(head)], **label}
    (temporary / "config.json").write_text(json.dumps(config, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
