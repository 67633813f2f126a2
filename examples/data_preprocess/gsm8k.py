"""GSM8K as training and validation files in verl's row form.

    python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k                       # from the hub
    python examples/data_preprocess/gsm8k.py --local_dataset_path /data/gsm8k --local_save_dir …  # a folder or clone

A local data set is a folder that holds, at any depth, one parquet, json or jsonl file (or several) for each split, with
`train` or `test` in their names and the columns `question` and `answer`, as the data set is published. The hub needs
the package `datasets` and a network.
"""

from __future__ import annotations

import re
from typing import Any

from raw_rows import arguments, raw_rows, write

SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def main() -> None:
    """Command line."""
    args = arguments(__doc__, "gsm8k")
    for split in ("train", "test"):
        raw = raw_rows(SOURCE, args.local_dataset_path, split, ("question", "answer"), "main")
        write(args.local_save_dir, split, (to_row(row, split, index) for index, row in enumerate(raw)))


def to_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """One row in verl's form."""
    final = re.search(r"####\s*(-?[\d,.]+)", raw["answer"])
    if final is None:
        where = f"{split}, row {index} (counted from 0)"
        raise SystemExit(f"{where}: its answer has no '#### number': {raw['answer'][-80:]!r}")
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": f"{raw['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": raw["question"], "answer": raw["answer"]},
    }


if __name__ == "__main__":
    main()
