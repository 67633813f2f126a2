"""DAPO-Math-17k and AIME 2024, which are published in verl's row form, with every question once.

    python examples/data_preprocess/dapo_math.py --local_save_dir ~/data/dapo_math                     # from the hub
    python examples/data_preprocess/dapo_math.py --local_dataset_path /data/dapo --local_save_dir …      # a folder

The published training file repeats its 17,000 questions a hundred times; here each is kept once, and a run's
`trainer.total_epochs` says how often it comes. A local data set is a folder with the published files, `dapo` and `aime`
in their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from raw_rows import arguments, hub_rows, local_rows, write

TRAIN, TEST = "BytedTsinghua-SIA/DAPO-Math-17k", "BytedTsinghua-SIA/AIME-2024"
COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")


def main() -> None:
    """Command line."""
    args = arguments(__doc__, "dapo_math")
    for split, source, mark in (("train", TRAIN, "dapo"), ("test", TEST, "aime")):
        write(args.local_save_dir, split, once(published(args.local_dataset_path, source, mark)))


def published(folder: Path | None, source: str, mark: str) -> Iterable[dict[str, Any]]:
    """The rows as they are published; the file's name has `mark` in it."""
    return hub_rows(source, "train") if folder is None else local_rows(folder.expanduser(), mark, COLUMNS)


def once(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each question the first time that it comes; two are the same when prompt and right answer are."""
    seen = set()
    for row in rows:
        key = (str(row["prompt"]), str(row["reward_model"]["ground_truth"]))
        if key not in seen:
            seen.add(key)
            yield dict(row)


if __name__ == "__main__":
    main()
