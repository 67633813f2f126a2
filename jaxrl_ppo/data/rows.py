"""Rows of parquet, json and jsonl files by number; a block of rows is loaded when one of them is needed."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import hashlib
import json
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl_ppo.data.local import LocalCopyError, copy_to_local

Row = dict[str, Any]

# Memory for loaded blocks. A shuffle draws from as many blocks at a time as fit (see sampler.py).
BLOCK_MEMORY = 1 << 27
FINGERPRINT_BYTES = 1 << 16


class DataError(ValueError):
    """A data file or row that cannot be used; the message names the file, the row where there is one, and the cure."""


class Rows(Protocol):
    """Numbered rows, in blocks of neighbours that are cheap to read together."""

    block_sizes: np.ndarray  # rows in each block, int64
    window: int  # how many blocks may be held in memory at a time
    blocks_of_files: list[int]  # how many blocks each file has

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """The columns of one row."""
        ...

    def where(self, index: int) -> str:
        """'FILE, line N' (jsonl) or 'FILE, row N (counted from 0)', for messages."""
        ...

    def fingerprint(self) -> list[dict[str, Any]]:
        """What the rows come from, as JSON-able data that changes when their content or order does."""
        ...


@dataclasses.dataclass(frozen=True)
class Block:
    """A run of neighbouring rows of one file. `load` reads it; the result gives each row by its number in the block."""

    path: Path
    first: int  # the file's number of the first row
    rows: int
    nbytes: int  # memory it takes when loaded; 0 when rows are read one by one
    load: Callable[[], Callable[[int], Row]]
    lines: np.ndarray | None = None  # each row's line in the file, from 1, where a row is a line


class FileRows:
    """The rows of several files, one after the other."""

    def __init__(self, files: str | Sequence[str], columns: Sequence[str], optional: Sequence[str], key: str):
        """Open `files` (paths or URLs; parquet, json or jsonl) for their `columns` and, where present, `optional` ones.

        `key` is the configuration key of the files, for messages. Raises DataError for a file that is missing,
        unreadable, empty or without one of the `columns`.
        """
        self.opened = (files, columns, optional, key)  # for a worker process that opens them again
        names = [files] if isinstance(files, str) else list(files)
        if not names:
            raise DataError(f"{key} is empty: name at least one file")
        self.paths: list[Path] = []
        self._blocks: list[Block] = []
        self.blocks_of_files: list[int] = []
        for name in names:
            try:
                path = copy_to_local(name) if "://" in name else Path(name).expanduser()
            except LocalCopyError as error:
                raise DataError(f"{key}: {error}") from error
            if not path.is_file():
                raise DataError(f"{key}: there is no file {name}" + (" (it is a folder)" if path.is_dir() else ""))
            self.paths.append(path)
            blocks = list(_open(path, columns, optional))
            if not blocks:
                raise DataError(f"{key}: {name} has no rows")
            self._blocks += blocks
            self.blocks_of_files.append(len(blocks))
        self.block_sizes = np.array([block.rows for block in self._blocks], np.int64)
        largest = max((block.nbytes for block in self._blocks), default=0)
        self.window = max(1, BLOCK_MEMORY // max(largest, 1))
        self._starts = np.concatenate([[0], np.cumsum(self.block_sizes)])
        self._start_list = self._starts.tolist()
        self._loaded: collections.OrderedDict[int, Callable[[int], Row]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _find(self, index: int) -> tuple[int, int]:
        block = bisect.bisect_right(self._start_list, index) - 1
        return block, index - self._start_list[block]

    def row(self, index: int) -> Row:
        """The columns of one row; DataError when its block is damaged."""
        number, offset = self._find(index)
        with self._lock:
            rows = self._loaded.get(number)
            if rows is None:
                rows = self._blocks[number].load()
                while len(self._loaded) > self.window:  # one more than a window, for the step from one to the next
                    self._loaded.popitem(last=False)
                self._loaded[number] = rows
            self._loaded.move_to_end(number)
        return rows(offset)

    def where(self, index: int) -> str:
        """'FILE, line N' (jsonl, from 1) or 'FILE, row N (counted from 0)'."""
        number, offset = self._find(index)
        block = self._blocks[number]
        if block.lines is not None:
            return f"{block.path}, line {block.lines[offset]}"
        return _numbered(block.path, block.first + offset)

    def fingerprint(self) -> list[dict[str, Any]]:
        """Name, rows, size and a checksum of both ends of each file. Where a file lies does not matter."""
        rows: dict[Path, int] = collections.Counter()
        for block in self._blocks:
            rows[block.path] += block.rows
        return [
            {"file": path.name, "rows": rows[path], "bytes": path.stat().st_size, "ends": _ends(path)}
            for path in self.paths
        ]


class UserRows:
    """The rows of a user's data set class (`data.custom_cls`): anything with a length and items in verl's row form."""

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self.block_sizes = np.array([len(dataset)], np.int64)
        self.window = 1
        self.blocks_of_files = [1]

    def __len__(self) -> int:
        return int(self.block_sizes[0])

    def row(self, index: int) -> Row:
        """The columns of one row."""
        row = self._dataset[index]
        if not isinstance(row, dict):
            raise DataError(f"{self.where(index)}: the class returned {type(row).__name__}, not a dict of columns")
        return row

    def where(self, index: int) -> str:
        """'CLASS, row N (counted from 0)'."""
        return _numbered(type(self._dataset).__name__, index)

    def fingerprint(self) -> list[dict[str, Any]]:
        """Class name and length: all that can be known."""
        return [{"class": type(self._dataset).__name__, "rows": len(self)}]


def _numbered(source: Path | str, row: int) -> str:
    return f"{source}, row {row} (counted from 0)"


def _open(path: Path, columns: Sequence[str], optional: Sequence[str]) -> Iterator[Block]:
    """The blocks of one file, by its suffix."""
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".pq"):
        yield from _open_parquet(path, columns, optional)
    elif suffix in (".json", ".jsonl", ".ndjson"):
        yield from _open_json(path, columns)
    else:
        raise DataError(f"{path}: the suffix {suffix or '(none)'} is none of .parquet, .json, .jsonl")


def _require_columns(path: Path, columns: Sequence[str], present: Sequence[str]) -> None:
    missing = [column for column in columns if column not in present]
    if missing:
        raise DataError(
            f"{path}: no column {', '.join(map(repr, missing))}; it has {', '.join(map(repr, present))}. "
            "data.prompt_key and data.reward_fn_key say which columns are read"
        )


def _open_parquet(path: Path, columns: Sequence[str], optional: Sequence[str]) -> Iterator[Block]:
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error
    _require_columns(path, columns, file.schema_arrow.names)
    wanted = [name for name in (*columns, *optional) if name in file.schema_arrow.names]
    first = 0
    for group in range(file.metadata.num_row_groups):
        meta = file.metadata.row_group(group)
        chunks = [meta.column(i) for i in range(meta.num_columns)]
        nbytes = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in wanted)

        def load(group: int = group) -> Callable[[int], Row]:
            try:
                table = file.read_row_group(group, columns=wanted)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path}: row group {group} is damaged: {error}") from error
            return lambda index: table.slice(index, 1).to_pylist()[0]

        if meta.num_rows:
            yield Block(path, first, meta.num_rows, nbytes, load)
        first += meta.num_rows


def _open_json(path: Path, columns: Sequence[str]) -> Iterator[Block]:
    """One block: an array is parsed whole, of one object a line only the line ends are kept."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
    start = 0
    while start < len(data) and data[start] in b" \t\r\n":
        start += 1
    lines = None
    if data[start : start + 1] == b"[":
        row, count = _json_array(path, data)
    else:
        row, lines = _json_lines(path, data)
        count = len(lines)
    if count:
        _require_columns(path, columns, list(row(0)))
        yield Block(path, 0, count, 0, lambda: row, lines)


def _json_array(path: Path, data: Any) -> tuple[Callable[[int], Row], int]:
    try:
        rows = json.loads(data[:])
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{_numbered(path, number)}: a {type(row).__name__}, not an object with columns")
    return rows.__getitem__, len(rows)


def _json_lines(path: Path, data: Any) -> tuple[Callable[[int], Row], np.ndarray]:
    """What gives each row, and the rows' lines."""
    starts, ends, lines = _line_index(data)

    def row(index: int) -> Row:
        where = f"{path}, line {lines[index]}"
        try:
            value = json.loads(data[starts[index] : ends[index]])
        except ValueError as error:
            raise DataError(f"{where}: not valid JSON: {_fault(error)}") from error
        if not isinstance(value, dict):
            raise DataError(f"{where}: a {type(value).__name__}, not an object with columns")
        return value

    return row, lines


def _fault(error: ValueError) -> str:
    """What is wrong with one line; the error's own text counts lines within it."""
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _line_index(data: Any, chunk: int = 1 << 24) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, end and number, from 1, of every line of `data` that is not blank."""
    newlines = [
        np.flatnonzero(np.frombuffer(data[at : at + chunk], np.uint8) == ord("\n")) + at
        for at in range(0, len(data), chunk)
    ]
    ends = np.concatenate([*newlines, [len(data)]]).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    short = np.flatnonzero(ends - starts < 8)  # the shortest row with a column is longer, so others are not blank
    keep = np.ones(len(ends), bool)
    keep[[i for i in short if not data[starts[i] : ends[i]].strip()]] = False
    return starts[keep], ends[keep], np.flatnonzero(keep) + 1


def _ends(path: Path) -> str:
    """Checksum of the file's first and last 64 KiB; a parquet file's last part holds the statistics of all columns."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(FINGERPRINT_BYTES))
        file.seek(max(0, path.stat().st_size - FINGERPRINT_BYTES))
        digest.update(file.read(FINGERPRINT_BYTES))
    return digest.hexdigest()[:16]
