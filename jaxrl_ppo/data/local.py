"""Brings models and data files to this node: a local path stays, a URL or a hub id is copied into a cache, once."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

import fsspec
from filelock import FileLock

from jaxrl_ppo.schema.places import is_address, is_hub_id

# What a model folder is read for; other weight formats on the hub are not fetched.
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt")
HUB_FILES = (*SMALL_FILES, "*.safetensors")


class LocalCopyError(Exception):
    """A path, URL or hub id from which nothing could be had; the message says what was tried."""


def cache_folder() -> Path:
    """Where this node keeps copies and computed indexes: $JAXRL_PPO_CACHE, else ~/.cache/jaxrl_ppo."""
    return Path(os.environ.get("JAXRL_PPO_CACHE") or "~/.cache/jaxrl_ppo").expanduser()


def copy_to_local(
    path: str | Path, *, key: str | None = None, hub_files: Sequence[str] = HUB_FILES, fetch: bool = True
) -> Path:
    """A local file or folder with the content of `path`: a local path, an fsspec URL or a Hugging Face hub id.

    A URL is fetched once per node and version (size, time or tag of each remote file) into the cache, safe against
    concurrent starts: one process copies under a lock, to a temporary name, and renames when all is there. Hub ids go
    through the hub's own cache, which works likewise; of their files those are fetched that match `hub_files`.

    Raises LocalCopyError, which names the configuration key `key`, where that is given. Without `fetch` it is raised
    for every URL, and for a hub id that is not in the hub's cache.
    """
    text = str(path)
    what = text if key is None else f"{key}={text}"
    local = Path(text.removeprefix("file://")).expanduser()
    if local.exists():
        return local.resolve()
    if text.startswith("file://"):
        raise LocalCopyError(f"{what}: no such file or folder")
    if is_address(text):
        if not fetch:
            raise LocalCopyError(f"{what}: is not on this machine")
        return _copy_url(text, what)
    if is_hub_id(text):
        return _hub_snapshot(text, what, hub_files, fetch)
    raise LocalCopyError(f"{what}: no such file or folder (looked for {local.absolute()})")


def _copy_url(url: str, what: str) -> Path:
    try:
        fs, remote = fsspec.core.url_to_fs(url)
        listing = fs.find(remote, detail=True)
    except (OSError, ValueError, ImportError) as error:
        raise LocalCopyError(f"{what}: {error}") from error
    if not listing:
        raise LocalCopyError(f"{what}: no such file or folder")
    version = hashlib.sha256(url.encode())
    for name, info in sorted(listing.items()):
        stamp = [info.get(key) for key in ("size", "mtime", "created", "LastModified", "updated", "ETag", "etag")]
        version.update(f"{name} {stamp}\n".encode())
    place = cache_folder() / "copies" / version.hexdigest()[:24] / (remote.rstrip("/").rpartition("/")[2] or "copy")
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(place.parent / ".lock"):
        if not place.exists():
            for leftover in place.parent.glob(".partial-*"):  # of a process that died while it held the lock
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            partial = place.parent / f".partial-{uuid.uuid4().hex}"
            try:
                _fetch(fs, remote, partial, listing)
            except OSError as error:
                raise LocalCopyError(f"{what}: copying it to {place} failed: {error}") from error
            partial.rename(place)
    return place


def _fetch(fs: fsspec.AbstractFileSystem, remote: str, target: Path, listing: dict[str, dict]) -> None:
    if fs.isfile(remote):
        fs.get_file(remote, str(target))
        return
    root = fs._strip_protocol(remote).rstrip("/")
    for name in listing:
        file = target / name.removeprefix(root).lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(name, str(file))


def _hub_snapshot(model: str, what: str, files: Sequence[str], fetch: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(files), local_files_only=not fetch))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise LocalCopyError(
            f"{what}: no such folder here, and not found on the Hugging Face Hub: {str(error).splitlines()[0]}"
        ) from error
