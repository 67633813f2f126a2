"""Rows in verl's form, and files of them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq


def row(index, text=None, **columns):
    """A row in verl's form."""
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": text if text is not None else f"What is {index} + {index}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * index)},
        "extra_info": {"index": index},
        **columns,
    }


def write_rows(path, rows, **parquet_options):
    """Writes rows as the suffix of `path` says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, **parquet_options)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False))
    else:
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    return str(path)
