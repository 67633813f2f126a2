"""Raw rows of a published data set: from a local folder or clone, or from the hub. Used by the scripts beside it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SUFFIXES = (".parquet", ".json", ".jsonl")


def arguments(description: str | None, name: str) -> argparse.Namespace:
    """The command line that all scripts share; `name` is that of the default output folder."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", type=Path, help="folder with the raw data set; default: the hub")
    parser.add_argument("--local_save_dir", type=Path, default=Path("~/data", name), help="where the files are written")
    return parser.parse_args()


def raw_rows(source: str, folder: Path | None, split: str, columns: Sequence[str], config: str | None = None) -> Any:
    """The rows of one split of the hub's data set `source`, or of the files in `folder`; each has the `columns`."""
    return hub_rows(source, split, config) if folder is None else local_rows(folder.expanduser(), split, columns)


def local_rows(folder: Path, split: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The raw rows of one split from a folder's files."""
    files = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and split in p.name and p.is_file())
    # The published clone of GSM8K holds a second configuration, with Socratic questions.
    files = [p for p in files if "socratic" not in str(p.relative_to(folder))]
    if not files:
        raise SystemExit(f"{folder}: no {', '.join(SUFFIXES)} file with {split!r} in its name")
    for file in files:
        if file.suffix == ".parquet":
            rows = pq.read_table(file).to_pylist()
        elif (text := file.read_text(encoding="utf-8")).lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        missing = set(columns) - set(rows[0]) if rows else set()
        if missing:
            raise SystemExit(f"{file}: no column {', '.join(sorted(missing))}; it has {', '.join(rows[0])}")
        yield from rows


def hub_rows(source: str, split: str, config: str | None = None) -> Any:
    """The raw rows of one split from the hub."""
    try:
        import datasets
    except ImportError as error:
        raise SystemExit("reading from the hub needs the package datasets; or use --local_dataset_path") from error
    return datasets.load_dataset(source, config, split=split)


def write(folder: Path, split: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write one split's rows in verl's form, and say so."""
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(rows))
    pq.write_table(table, folder / f"{split}.parquet")
    print(f"{folder / f'{split}.parquet'}: {table.num_rows} rows")
