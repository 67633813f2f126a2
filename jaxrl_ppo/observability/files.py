"""Files that a reader never sees half-written: atomic replacement, appended JSON lines, tolerant reading of both."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` in one rename, so that a reader or a crash finds the old or the new file, whole."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def plain(value: Any) -> Any:
    """`value` as something JSON can hold: numpy scalars and arrays unwrapped, NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int | bool) or value is None:
        return value
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def json_line(row: Mapping[str, Any]) -> str:
    """One row as a line of JSON, newline included."""
    try:
        return _ENCODE(row) + "\n"
    except (ValueError, TypeError):  # numpy values, NaN; `plain` is slow on long lists of tokens, so only then
        return _ENCODE(plain(row)) + "\n"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a half-written last line (a writer killed in the middle) is left out.

    Returns [] when the file does not exist. Raises ValueError naming file and line when a line that is not the last
    one cannot be read.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    return rows
