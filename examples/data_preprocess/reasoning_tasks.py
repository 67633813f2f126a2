"""Tasks of reasoning-gym as training and validation files in verl's row form: real data with no download.

    python examples/data_preprocess/reasoning_tasks.py --task chain_sum --local_save_dir ~/data/chain_sum
    python examples/data_preprocess/reasoning_tasks.py --task basic_arithmetic --config '{"max_terms": 3}' …
    python examples/data_preprocess/reasoning_tasks.py --task chain_sum --tool_examples 3 …
    python examples/data_preprocess/reasoning_tasks.py --list

`--tool_examples` puts so many solved questions in front of each one, solved with examples/tools/calculator.py: what a
small model needs to see before it calls a tool at all. It takes a task with an `expression` (chain_sum,
basic_arithmetic), and a run with `rollout.multi_turn`.

Needs `pip install reasoning-gym`. Rows are scored by the package's own scorer for their task, which comes along
(data_source `reasoning_gym/TASK`); a row keeps the task's seed, size, configuration and index, from which the scorer
makes the question anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import reasoning_gym
from reasoning_gym.factory import DATASETS

INSTRUCTION = "Give the final answer between <answer> and </answer>."


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", help="which task, e.g. chain_sum")
    parser.add_argument("--list", action="store_true", help="print the names of all tasks")
    parser.add_argument("--config", default="{}", help="the task's settings as JSON")
    parser.add_argument("--train_size", type=int, default=1000)
    parser.add_argument("--test_size", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the training rows; the validation rows take the next")
    parser.add_argument("--tool_examples", type=int, default=0, help="solved questions in front of each question")
    parser.add_argument("--local_save_dir", type=Path, default=Path("~/data/reasoning_gym"))
    args = parser.parse_args()
    if args.list:
        print("\n".join(sorted(DATASETS)))
        return
    if args.task not in DATASETS:
        parser.error(f"--task {args.task}: there is no such task; --list shows them all")
    folder = args.local_save_dir.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for split, size, seed in (("train", args.train_size, args.seed), ("test", args.test_size, args.seed + 1)):
        before = solved(args.task, args.tool_examples, args.seed + 2, args.config)
        table = pa.Table.from_pylist(list(make_rows(args.task, split, size, seed, args.config, before)))
        pq.write_table(table, folder / f"{split}.parquet")
        print(f"{folder / f'{split}.parquet'}: {table.num_rows} rows")


def create(task: str, seed: int, size: int, config: str) -> Any:
    """The task's questions."""
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(config))
    except (TypeError, ValueError, AssertionError) as error:
        raise SystemExit(f"{task} does not take --config {config}: {error}") from error


def solved(task: str, count: int, seed: int, config: str) -> list[dict[str, str]]:
    """Messages of `count` questions that a calculator solves."""
    messages = []
    for question in create(task, seed, count, config) if count else []:
        if "expression" not in question["metadata"]:
            raise SystemExit(f"--tool_examples: the questions of {task} have no expression for a calculator")
        call = {"name": "calculator", "arguments": {"expression": question["metadata"]["expression"]}}
        messages += [
            {"role": "user", "content": question["question"]},
            {"role": "assistant", "content": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"},
            {"role": "user", "content": f"<tool_response>\n{question['answer']}\n</tool_response>"},
            {"role": "assistant", "content": f"<answer>{question['answer']}</answer>"},
        ]
    return messages


def make_rows(
    task: str, split: str, size: int, seed: int, config: str, before: Sequence[dict[str, str]] = ()
) -> Iterator[dict[str, Any]]:
    """The rows of one split; `before` are messages in front of each question."""
    for index, question in enumerate(create(task, seed, size, config)):
        content = question["question"] if before else f"{question['question']} {INSTRUCTION}"
        yield {
            "data_source": f"reasoning_gym/{task}",
            "prompt": [*before, {"role": "user", "content": content}],
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": str(question["answer"])},
            "extra_info": {
                "split": split,
                "task": task,
                "seed": seed,
                "size": size,
                "config": config,
                "index": index,
            },
        }


if __name__ == "__main__":
    main()
