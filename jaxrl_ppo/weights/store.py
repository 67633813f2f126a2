"""A node's weight store: the newest versions as safetensors files in shared memory, committed atomically."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxrl_ppo.weights.manifest import NotBegunError, TensorRecord, WeightError, WeightManifest

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "jaxrl_ppo-"
DTYPES = {np.dtype(np.float32): "float32", np.dtype(ml_dtypes.bfloat16): "bfloat16"}
KEEP = 2  # the version being loaded by replicas, and the one before it, which a slow reader may not have mapped yet
ABANDONED_AFTER_S = 60  # younger stores may be between their creation and their owner's lock


class StoreFullError(OSError):
    """The store's file system has no room for another version. Committed versions are untouched."""


def choose_root(name: str, needed_bytes: int) -> Path:
    """A folder for the store called `name`: shared memory if the versions it may hold fit there, else temporary files.

    Args:
        name: unique to the run, so that two runs on a node do not share a store.
        needed_bytes: size of one version.
    """
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        # While a version is written, the store holds it beside the KEEP committed ones.
        if shutil.disk_usage(SHARED_MEMORY).free >= (KEEP + 1) * needed_bytes:
            return SHARED_MEMORY / (PREFIX + name)
        logger.warning(
            "%s has no room for %d versions of %d bytes: the weight store goes to %s, which is slower",
            SHARED_MEMORY,
            KEEP + 1,
            needed_bytes,
            tempfile.gettempdir(),
        )
    return Path(tempfile.gettempdir()) / (PREFIX + name)


class WeightStore:
    """Versions under `root`, one folder each; the newest two commits are kept.

    Writing is `begin`, `put` for each bucket, `commit`. Until the commit nothing is visible to readers. A version may
    be deleted while somebody reads it: readers map the files before they read, and POSIX keeps the pages of a mapped
    file until the last mapping is gone.

    A store belongs to one process, which holds a lock on `root`; the lock goes with the process. What a crashed owner
    left half-written is deleted by the next one, its committed versions are kept. Stores of crashed runs beside `root`
    (same parent, same prefix, nobody's lock) are deleted too, since nothing else would give their memory back.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "lock").touch(0o600)
        lock = _try_lock(self.root)
        if lock is None:
            raise WeightError(
                f"{self.root} is the weight store of another running process: give each run its own folder "
                "(trainer.default_local_dir), and each machine one Ray node"
            )
        self._lock: int | None = lock
        self._writing: Path | None = None
        self._version = -1
        self._records: dict[str, TensorRecord] = {}
        self._files = 0
        _delete_abandoned(self.root)
        for folder in self.root.glob("writing-*"):
            shutil.rmtree(folder)
        self._commits = max((commit_number(folder) for folder in self._committed()), default=0)

    def begin(self, version: int) -> str:
        """Start writing `version` (number of actor optimizer steps). An unfinished earlier write is dropped.

        Returns the folder for its files: a process of this node may write them itself (`write_bucket`) and `add` them.
        """
        self._abandon()
        self._writing = self.root / f"writing-{version}"
        self._writing.mkdir()
        self._version, self._records, self._files = version, {}, 0
        return str(self._writing)

    def put(self, version: int, bucket: Mapping[str, np.ndarray]) -> None:
        """Write tensors (name -> float32 or bfloat16 array) of the version begun last, as one file.

        Raises StoreFullError, after which the version has to be begun again, and WeightError for a tensor that is
        already there or has another dtype.
        """
        try:
            records = write_bucket(self._folder_of(version), self._files, bucket)
        except StoreFullError:
            self._abandon()
            raise
        self.add(version, records)

    def add(self, version: int, records: Mapping[str, TensorRecord]) -> None:
        """Take up a file that `write_bucket` has written into the folder of the version begun last.

        Raises WeightError for a tensor that is already there.
        """
        self._folder_of(version)
        for name in records:
            if name in self._records:
                raise WeightError(f"weights of version {version}: tensor {name} was put twice")
        self._records |= records
        self._files += 1

    def commit(self, version: int, number: int | None = None) -> WeightManifest:
        """Make `version` the latest, visible at once and whole, and delete all but the newest two.

        `number` orders commits and names the folder; several stores that are given one have it under one path. It must
        be larger than those before; None counts on.
        """
        folder = self._folder_of(version)
        if not self._records:
            raise WeightError(f"weights of version {version}: committed without a single tensor")
        # The manifest is the last file written and the rename the only visible act. Nothing is synced to disk: the
        # store need not outlive its node.
        try:
            WeightManifest(version, str(folder), self._records).write()
        except OSError as error:
            self._abandon()
            raise StoreFullError(f"{self.root}: could not write the manifest of version {version} ({error})") from error
        # Commits are numbered because versions need not grow: a run that resumes from an older checkpoint goes back.
        self._commits = self._commits + 1 if number is None else number
        final = self.root / f"{self._commits:08d}-version-{version}"
        folder.rename(final)
        self._writing = None
        for old in self._committed()[:-KEEP]:
            shutil.rmtree(old)
        return WeightManifest(version, str(final), self._records)

    def latest(self) -> WeightManifest | None:
        """The version committed last, None before the first commit."""
        committed = self._committed()
        return WeightManifest.read(committed[-1]) if committed else None

    def close(self) -> None:
        """Delete the store and all its versions."""
        if self._lock is not None:
            shutil.rmtree(self.root, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def _folder_of(self, version: int) -> Path:
        if self._writing is None or version != self._version:
            raise NotBegunError(f"weights of version {version}: not begun, or dropped by a later begin or a failed put")
        return self._writing

    def _abandon(self) -> None:
        if self._writing is not None:
            shutil.rmtree(self._writing)
            self._writing = None

    def _committed(self) -> list[Path]:
        return sorted(self.root.glob("*-version-*"), key=commit_number)


def write_bucket(folder: str | Path, number: int, bucket: Mapping[str, np.ndarray]) -> dict[str, TensorRecord]:
    """Write tensors (name -> float32 or bfloat16 array) as file `number` of the version being written in `folder`.

    Raises StoreFullError, WeightError for a tensor of another dtype, and NotBegunError when the folder is not there.
    """
    folder = Path(folder)
    file = f"bucket-{number:05d}.safetensors"
    arrays, records = {}, {}
    for name, value in bucket.items():
        if value.dtype not in DTYPES:
            allowed = " or ".join(DTYPES.values())
            raise WeightError(f"{folder.name}: tensor {name} is {value.dtype}, not {allowed}")
        # safetensors writes the buffer behind an array whatever its strides say: a transposed view would be stored
        # transposed back.
        arrays[name] = np.ascontiguousarray(value)
        records[name] = TensorRecord(file, DTYPES[value.dtype], tuple(value.shape), checksum(arrays[name]))
    try:
        save_file(arrays, folder / file)
    except (OSError, SafetensorError) as error:
        if not folder.is_dir():
            raise NotBegunError(f"{folder} is gone, and the weights on their way with it") from error
        size, free = sum(array.nbytes for array in arrays.values()), shutil.disk_usage(folder).free
        raise StoreFullError(
            f"{folder}: could not write {size / 2**20:.1f} MiB of weights, {free / 2**20:.1f} MiB free ({error}). Give "
            f"the store's file system room for {KEEP + 1} copies of the model (containers: a larger /dev/shm) or "
            "another root"
        ) from error
    return records


def checksum(array: np.ndarray) -> int:
    """XXH3 (64 bits) of a contiguous array's bytes, in C order: several times as fast as a CRC, which matters here."""
    return xxhash.xxh3_64_intdigest(array.reshape(-1).view(np.uint8).data)


def commit_number(folder: str | Path) -> int:
    """The number in a committed version's folder name."""
    return int(Path(folder).name.split("-", 1)[0])


def _try_lock(folder: Path) -> int | None:
    """A descriptor holding the lock of the store in `folder`, or None if another process has it."""
    descriptor = os.open(folder / "lock", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _delete_abandoned(root: Path) -> None:
    """Delete stores beside `root` whose owner is gone. Stores of other users are left alone."""
    for other in root.parent.glob(PREFIX + "*"):
        if other == root:
            continue
        with contextlib.suppress(PermissionError, FileNotFoundError):
            young = time.time() - (other / "lock").stat().st_mtime < ABANDONED_AFTER_S
            descriptor = None if young else _try_lock(other)
            if descriptor is not None:
                logger.warning("deleting %s, the weight store of a run that is gone", other)
                shutil.rmtree(other)
                os.close(descriptor)
