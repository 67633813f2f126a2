"""A node's weight store: the newest versions as safetensors files in shared memory, committed atomically."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
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
            raise WeightError(f"{self.root} is the weight store of another running process: give each run its own")
        self._lock: int | None = lock
        self._writing: Path | None = None
        self._version = -1
        self._records: dict[str, TensorRecord] = {}
        self._files = 0
        _delete_abandoned(self.root)
        for folder in self.root.glob("writing-*"):
            shutil.rmtree(folder)
        self._commits = max((commit_number(folder) for folder in self._committed()), default=0)

    def begin(self, version: int) -> None:
        """Start writing `version` (number of actor optimizer steps). An unfinished earlier write is dropped."""
        self._abandon()
        self._writing = self.root / f"writing-{version}"
        self._writing.mkdir()
        self._version, self._records, self._files = version, {}, 0

    def put(self, version: int, bucket: Mapping[str, np.ndarray]) -> None:
        """Write tensors (name -> float32 or bfloat16 array) of the version begun last, as one file.

        Raises StoreFullError, after which the version has to be begun again, and WeightError for a tensor that is
        already there or has another dtype.
        """
        folder = self._folder_of(version)
        file = f"bucket-{self._files:05d}.safetensors"
        arrays, records = {}, {}
        for name, value in bucket.items():
            if name in self._records:
                raise WeightError(f"weights of version {version}: tensor {name} was put twice")
            if value.dtype not in DTYPES:
                raise WeightError(f"weights of version {version}: tensor {name} is {value.dtype}, not {_ALLOWED}")
            # safetensors writes the buffer behind an array whatever its strides say: a transposed view would be
            # stored transposed back.
            arrays[name] = np.ascontiguousarray(value)
            records[name] = TensorRecord(file, DTYPES[value.dtype], tuple(value.shape), crc32(arrays[name]))
        size = sum(array.nbytes for array in arrays.values())
        try:
            save_file(arrays, folder / file)
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(self.root).free
            self._abandon()
            raise StoreFullError(
                f"{self.root}: could not write {size / 2**20:.1f} MiB of weight version {version}, "
                f"{free / 2**20:.1f} MiB free ({error}). Give the store's file system room for {KEEP + 1} copies of "
                "the model (containers: a larger /dev/shm) or another root"
            ) from error
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


_ALLOWED = " or ".join(DTYPES.values())


def crc32(array: np.ndarray) -> int:
    """CRC-32 of a contiguous array's bytes, in C order."""
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


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
