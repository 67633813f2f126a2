"""Loads what a user names in the configuration from a Python file of theirs, with errors that point into that file."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

SLOW_IMPORT_S = 5.0  # an import is told of after this, and again whenever it has lasted four times as long


class UserCodeError(Exception):
    """A user's file, or a name in it, is missing or broken; the message names the configuration key, file and line."""


def load_name(path: str, name: str, key: str) -> Any:
    """`name` from the Python file `path`; the file is executed once per process.

    `key` is the configuration key that named the file, for messages. Raises UserCodeError for a missing file, one that
    fails when executed, or one without that name.
    """
    module = load_file(path, key)
    file = module.__file__
    if not hasattr(module, name):
        own = sorted(n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__)
        raise UserCodeError(f"{key}: {file} has no {name!r}; what it defines: {', '.join(own) or 'nothing'}")
    return getattr(module, name)


def load_file(path: str, key: str) -> ModuleType:
    """The Python file `path` as a module; see `load_name`."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserCodeError(f"{key}: there is no file {file}")
    # The name is a function of the path, so that objects of the module's classes can be pickled between processes.
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserCodeError(f"{key}: {file} is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with telling_when_slow(f"{file} ({key})"):
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserCodeError(f"{key}: {describe(error, file)}") from error
    return module


@contextlib.contextmanager
def telling_when_slow(what: str, at_most_s: float | None = None) -> Iterator[None]:
    """Warn, from a thread, that `what` is still importing where the block takes long; `at_most_s` is its deadline."""
    limit = "" if at_most_s is None else f" of {at_most_s:g} s at most"
    over = threading.Event()

    def tell() -> None:
        waited, told = 0.0, SLOW_IMPORT_S
        while not over.wait(told - waited):
            log.warning(f"still importing, after {told:g}{limit or ' s'}: {what}")
            waited, told = told, 4 * told

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextlib.contextmanager
def located(path: str | Path, key: str) -> Iterator[None]:
    """What a user's code of the file `path` raises becomes a UserCodeError that names `key`, file and line."""
    try:
        yield
    except UserCodeError:
        raise
    except Exception as error:
        raise UserCodeError(f"{key}: {describe(error, Path(path).expanduser().resolve())}") from error


def describe(error: BaseException, file: Path) -> str:
    """`error` in one line, with the last line of `file` that it passed through."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    line = f", line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error} ({file}{line})"
