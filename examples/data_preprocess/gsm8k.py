"""GSM8K as training and validation files in verl's row form.

    python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k                       # from the hub
    python examples/data_preprocess/gsm8k.py --local_dataset_path /data/gsm8k --local_save_dir …  # a folder or clone

A local data set is a folder that holds, at any depth, one parquet, json or jsonl file (or several) for each split, with
`train` or `test` in their names and the columns `question` and `answer`, as the data set is published. The hub needs
the package `datasets` and a network.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SUFFIXES = (".parquet", ".json", ".jsonl")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", type=Path, help="folder with the raw data set; default: the hub")
    parser.add_argument("--local_save_dir", type=Path, default=Path("~/data/gsm8k"), help="where the files are written")
    args = parser.parse_args()
    folder = args.local_save_dir.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        raw = local_rows(args.local_dataset_path.expanduser(), split) if args.local_dataset_path else hub_rows(split)
        rows = [to_row(row, split, index) for index, row in enumerate(raw)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
        print(f"{folder / f'{split}.parquet'}: {len(rows)} rows")


def to_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """One row in verl's form."""
    final = re.search(r"####\s*(-?[\d,.]+)", raw["answer"])
    if final is None:
        raise SystemExit(f"{split}, row {index}: its answer has no '#### number': {raw['answer'][-80:]!r}")
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": f"{raw['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": raw["question"], "answer": raw["answer"]},
    }


def local_rows(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    """The raw rows of one split from a folder's files."""
    files = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and split in p.name and p.is_file())
    # The published clone holds a second configuration, with Socratic questions.
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
        missing = {"question", "answer"} - set(rows[0]) if rows else set()
        if missing:
            raise SystemExit(f"{file}: no column {', '.join(sorted(missing))}; it has {', '.join(rows[0])}")
        yield from rows


def hub_rows(split: str) -> Any:
    """The raw rows of one split from the hub."""
    try:
        import datasets
    except ImportError as error:
        raise SystemExit("reading from the hub needs the package datasets; or use --local_dataset_path") from error
    return datasets.load_dataset(SOURCE, "main", split=split)


if __name__ == "__main__":
    main()
