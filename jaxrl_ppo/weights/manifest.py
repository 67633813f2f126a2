"""A weight version as it lies in a node's store: which tensors, in which files, with which checksums."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path


class WeightError(RuntimeError):
    """Weights that cannot be trusted: a tensor missing, unknown, mis-shaped or corrupt."""


class NotBegunError(WeightError):
    """A version that its store does not have on its way: dropped, or lost with a store that was restarted since."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies and what it must be. `checksum` is XXH3-64 of its bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int


@dataclasses.dataclass(frozen=True, slots=True)
class WeightManifest:
    """One committed version. `folder` holds `manifest.json` and the safetensors files that it names."""

    version: int
    folder: str
    tensors: dict[str, TensorRecord]

    def write(self) -> None:
        """Write `manifest.json` into `folder`."""
        body = {"version": self.version, "tensors": {k: dataclasses.asdict(v) for k, v in self.tensors.items()}}
        Path(self.folder, "manifest.json").write_text(json.dumps(body))

    @classmethod
    def read(cls, folder: str | Path) -> WeightManifest:
        """Read a committed version's manifest. Raises WeightError when there is none or it is malformed."""
        path = Path(folder, "manifest.json")
        try:
            body = json.loads(path.read_text())
            tensors = {
                name: TensorRecord(t["file"], t["dtype"], tuple(t["shape"]), t["checksum"])
                for name, t in body["tensors"].items()
            }
            return cls(body["version"], str(folder), tensors)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightError(f"{path}: not a readable weight manifest ({error})") from error
