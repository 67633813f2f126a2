"""Reads a committed weight version back: memory-mapped, verified, ordered by layer. No framework needed."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_ppo.weights.manifest import WeightError, WeightManifest
from jaxrl_ppo.weights.store import checksum

# safetensors' name -> (the manifest's name, numpy dtype)
DTYPES = {"F32": ("float32", np.dtype(np.float32)), "BF16": ("bfloat16", np.dtype(ml_dtypes.bfloat16))}


def layer_order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts a layer's tensors together and layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.]", name)]


def read_tensors(manifest: WeightManifest, verify: bool = True) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) for every tensor of `manifest`, those of one layer one after another.

    Arrays are copy-on-write views of the mapped files: nothing is copied until written to. All files are mapped before
    the first tensor is yielded, so the store may delete the version meanwhile.

    Args:
        verify: check each tensor's bytes against its checksum, just before it is yielded.

    Raises WeightError naming the tensor that is missing, mis-shaped, of another dtype or corrupt.
    """
    folder = Path(manifest.folder)
    views: dict[str, dict[str, np.ndarray]] = {}
    for file in sorted({record.file for record in manifest.tensors.values()}):
        views[file] = _map_file(folder / file, manifest.version)
    for name in sorted(manifest.tensors, key=layer_order):
        record = manifest.tensors[name]
        array = views[record.file].get(name)
        what = f"weight version {manifest.version}, tensor {name} in {folder / record.file}"
        if array is None:
            raise WeightError(f"{what}: missing")
        dtype = next(ours for ours, theirs in DTYPES.values() if theirs == array.dtype)
        if (dtype, array.shape) != (record.dtype, record.shape):
            raise WeightError(f"{what}: {dtype}{list(array.shape)}, expected {record.dtype}{list(record.shape)}")
        if verify and checksum(array) != record.checksum:
            raise WeightError(f"{what}: its bytes do not match its checksum")
        yield name, array


def read_header(data: bytes | mmap.mmap) -> tuple[dict[str, dict[str, Any]], int]:
    """The tensors that a safetensors file declares, by name, and where its data starts.

    The format: 8 bytes of header length, a JSON header, the data. Raises ValueError when it is anything else.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    return header, start


def _map_file(path: Path, version: int) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as views of its mapping.

    The safetensors library can only copy them out when it hands out numpy arrays.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header, start = read_header(data)
        views = {}
        for name, entry in header.items():
            dtype = DTYPES[entry["dtype"]][1]
            begin, end = entry["data_offsets"]
            count = (end - begin) // dtype.itemsize
            views[name] = np.frombuffer(data, dtype, count, start + begin).reshape(entry["shape"])
        return views
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightError(f"weight version {version}: {path} is not a readable safetensors file ({error})") from error
