"""A large parquet file: time to the first batch of prompts and peak memory, ours against the package datasets.

    python benchmarks/data.py --rows 10000000

Each reader runs in a process of its own with an empty cache, shuffles all rows, and tokenises a first batch of 1024
prompts with the same tokenizer. Needs the extra `benchmark` (.venv/bin/pip install -c requirements/constraints.txt -e
'.[benchmark]') and the quickstart's tokenizer (`make run` prepares it).
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

BATCH = 1024
ROW_GROUP = 100_000


def write(path: Path, rows: int) -> None:
    """Rows in verl's form: small sums, each with an index of its own."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    def table(first: int, count: int) -> pa.Table:
        numbers = np.arange(first, first + count)
        left, right, total = (
            pc.cast(pa.array(column), pa.string()) for column in (numbers, numbers % 977, numbers + numbers % 977)
        )
        text = pc.binary_join_element_wise("What is ", left, " + ", right, "? Answer with the number only.", "")
        message = pa.StructArray.from_arrays([pa.repeat("user", count), text], ["role", "content"])
        prompt = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), message)
        reward = pa.StructArray.from_arrays([pa.repeat("rule", count), total], ["style", "ground_truth"])
        info = pa.StructArray.from_arrays([pa.array(numbers)], ["index"])
        columns = {"data_source": pa.repeat("arithmetic", count), "prompt": prompt}
        return pa.table(columns | {"reward_model": reward, "extra_info": info})

    writer = None
    for first in range(0, rows, ROW_GROUP):
        part = table(first, min(ROW_GROUP, rows - first))
        writer = writer or pq.ParquetWriter(path, part.schema)
        writer.write_table(part)
    assert writer is not None
    writer.close()


def ours(path: Path, tokenizer_folder: Path) -> int:
    """Tokens of the first batch, through the run's own data path."""
    from jaxrl_ppo.data import PromptStream, create_rl_dataset, create_rl_sampler, hf_tokenizer
    from jaxrl_ppo.schema.config import DataConfig

    config = DataConfig(train_batch_size=BATCH, max_prompt_length=64)
    dataset = create_rl_dataset(str(path), config, hf_tokenizer(tokenizer_folder))
    stream = PromptStream(dataset, create_rl_sampler(config, dataset), BATCH, read_ahead_threads=2)
    batch = stream.take(BATCH)
    stream.close()
    return sum(len(prompt.token_ids) for prompt in batch)


def theirs(path: Path, tokenizer_folder: Path) -> int:
    """The same through `datasets.load_dataset`, as verl reads its files."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train").shuffle(seed=1)
    tokens = 0
    for row in rows.select(range(BATCH)):
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        tokens += len(tokenizer(text, add_special_tokens=False)["input_ids"])
    return tokens


def measure(reader: str, path: Path, tokenizer_folder: Path) -> dict[str, float]:
    """Seconds and peak memory of one reader in a fresh process, its imports included."""
    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        environment = os.environ | {"HF_HOME": cache, "JAXRL_PPO_CACHE": cache, "JAX_PLATFORMS": "cpu"}
        started = time.perf_counter()
        command = [
            sys.executable,
            __file__,
            "--reader",
            reader,
            "--file",
            str(path),
            "--tokenizer",
            str(tokenizer_folder),
        ]
        said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        wall = time.perf_counter() - started
        disk = sum(file.stat().st_size for file in Path(cache).rglob("*") if file.is_file())
    seconds, memory, tokens = map(float, said.split()[-3:])
    return {"batch_s": seconds, "process_s": wall, "memory_mb": memory, "disk_mb": disk / 1e6, "tokens": tokens}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--tokenizer", type=Path, default=Path(".quickstart/SmolLM2-135M-Instruct"))
    parser.add_argument("--file", type=Path, help="a file written before; default: a new one")
    parser.add_argument("--reader", choices=("ours", "datasets"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if find_spec("datasets") is None:
        parser.error("the package datasets is not installed: it comes with the extra `benchmark` (see --help)")
    if args.reader:
        started = time.perf_counter()
        tokens = (ours if args.reader == "ours" else theirs)(args.file, args.tokenizer)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(time.perf_counter() - started, memory, tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder, "rows.parquet")
        if args.file is None:
            write(path, args.rows)
        print(f"{args.rows:,} rows, {path.stat().st_size / 1e6:.0f} MB of parquet; first batch of {BATCH} prompts")
        results = {reader: measure(reader, path, args.tokenizer) for reader in ("ours", "datasets")}
    print("| | first batch | peak memory | written to disk |\n|---|---|---|---|")
    for reader, found in results.items():
        print(f"| {reader} | {found['batch_s']:.1f} s | {found['memory_mb']:.0f} MB | {found['disk_mb']:.0f} MB |")
    first, second = results.values()
    print(f"| ratio | {second['batch_s'] / first['batch_s']:.1f} | {second['memory_mb'] / first['memory_mb']:.2f} | |")


if __name__ == "__main__":
    main()
