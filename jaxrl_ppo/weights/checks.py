"""Whether a weight version is whole and fits a model: checked before an engine's weights are touched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from jaxrl_ppo.weights.manifest import WeightError, WeightManifest
from jaxrl_ppo.weights.reader import read_header, read_tensors

Shapes = Mapping[str, tuple[int, ...]]


def model_shapes(model_folder: str | Path) -> Shapes | None:
    """Name -> shape of the parameters in a Hugging Face folder; None if it holds no safetensors files.

    Without what a trainer need not export: buffers computed from the configuration, and an output projection that
    repeats the tied embeddings.
    """
    folder = Path(model_folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = file.read(8)
            header, _ = read_header(length + file.read(int.from_bytes(length, "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
    if json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return {name: shape for name, shape in shapes.items() if not name.endswith(".inv_freq")} or None


def verify(manifest: WeightManifest, expected: Shapes | None) -> None:
    """Raise WeightError when `manifest` has not just the tensors of `expected`, each of its shape, or is corrupt."""
    if expected is not None:
        missing = sorted(expected.keys() - manifest.tensors)
        unknown = sorted(manifest.tensors.keys() - expected.keys())
        for what, names in (("missing", missing), ("unknown to the model", unknown)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise WeightError(f"weight version {manifest.version}: tensor {names[0]}{more} {what}")
        for name, shape in expected.items():
            if manifest.tensors[name].shape != shape:
                raise WeightError(
                    f"weight version {manifest.version}: tensor {name} has shape {list(manifest.tensors[name].shape)}, "
                    f"the model's has {list(shape)}"
                )
    for _ in read_tensors(manifest, verify=True):
        pass
