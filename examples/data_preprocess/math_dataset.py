r"""MATH (competition mathematics) as training and validation files in verl's row form.

    python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math                       # from the hub
    python examples/data_preprocess/math_dataset.py --local_dataset_path /data/MATH --local_save_dir …  # a folder

A local data set is a folder with parquet, json or jsonl files that have `train` or `test` in their names and the
columns `problem` and `solution`. The right answer is what the solution's last \boxed{…} holds.
"""

from __future__ import annotations

from typing import Any

from raw_rows import arguments, raw_rows, write

from jaxrl_ppo.rewards.math_answers import last_boxed

SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def main() -> None:
    """Command line."""
    args = arguments(__doc__, "math")
    for split in ("train", "test"):
        raw = raw_rows(SOURCE, args.local_dataset_path, split, ("problem", "solution"))
        write(args.local_save_dir, split, (to_row(row, split, index) for index, row in enumerate(raw)))


def to_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """One row in verl's form."""
    answer = last_boxed(raw["solution"])
    if answer is None:
        where = f"{split}, row {index} (counted from 0)"
        raise SystemExit(f"{where}: its solution has no \\boxed{{…}}: {raw['solution'][-80:]!r}")
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": f"{raw['problem']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "level": str(raw.get("level", "")), "type": raw.get("type", "")},
    }


if __name__ == "__main__":
    main()
