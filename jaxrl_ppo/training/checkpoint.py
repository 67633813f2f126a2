"""The trainer's state on disk, by Orbax: written while training goes on, read onto any mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

Tree = Any
MODEL, OPTIMIZER, EXTRA = "model", "optimizer", "extra"  # as in actor.checkpoint.save_contents


ERROR_CHARACTERS = 500  # of storage errors, which list every array


class StateError(RuntimeError):
    """A folder that does not hold a complete trainer state, or holds another model's."""


class SaveError(OSError):
    """A trainer state that could not be written."""


class StateStore:
    """Saves and restores parts of a trainer's state: `model`, `optimizer` (trees of arrays), `extra` (JSON).

    All processes of the program call every method alike, and see the same file system. A folder appears under its name
    when everything in it is written, never before.
    """

    def __init__(self, *, asynchronous: bool = True):
        self.asynchronous = asynchronous
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())

    def save(self, folder: str | Path, parts: dict[str, Any]) -> None:
        """Start writing `parts` into `folder`, replacing what is there; the arrays may be donated once this returns.

        An earlier save is waited for; its failure is raised here. Without parts there will be no folder.
        """
        if not parts:
            self.wait()
            return
        items = {
            name: ocp.args.JsonSave(part) if name == EXTRA else ocp.args.StandardSave(part)
            for name, part in parts.items()
        }
        with _writing():
            self._checkpointer.save(Path(folder).absolute(), ocp.args.Composite(**items), force=True)
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Return when the last save is complete. Raises SaveError when it could not be written."""
        with _writing():
            self._checkpointer.wait_until_finished()

    def restore(self, folder: str | Path, parts: dict[str, Any]) -> dict[str, Any]:
        """Read the named parts. Trees are given as trees of ShapeDtypeStruct with the shardings to read onto.

        Raises StateError when the folder is missing, incomplete or of another model.
        """
        folder = Path(folder).absolute()
        if not folder.is_dir():
            raise StateError(f"{folder} does not exist: no trainer state to restore")
        if absent := [name for name in parts if not (folder / name).is_dir()]:
            raise StateError(f"{folder} holds no {', '.join(absent)}: not a complete trainer state")
        items = {
            name: ocp.args.JsonRestore() if name == EXTRA else ocp.args.StandardRestore(part)
            for name, part in parts.items()
        }
        try:
            return dict(self._checkpointer.restore(folder, ocp.args.Composite(**items)).items())
        except (ValueError, LookupError, TypeError, OSError, RuntimeError) as error:  # by what is damaged
            text = str(error)[:ERROR_CHARACTERS]
            raise StateError(
                f"{folder} is damaged, or another model's: {text}. To go on from an older checkpoint: "
                "trainer.resume_mode=resume_path and its folder, global_step_N, as trainer.resume_from_path"
            ) from error

    def close(self) -> None:
        """Wait for the last save and end the background threads."""
        self._checkpointer.close()


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Storage errors as one kind, whether Python or tensorstore met them. Their text is cut: it lists every array."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise SaveError(f"{type(error).__name__}: {str(error)[:ERROR_CHARACTERS]}") from error


def abstract(tree: Tree, shardings: Tree) -> Tree:
    """Shapes, dtypes and placements of a tree of arrays, as `restore` wants them."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)
