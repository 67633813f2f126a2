"""The run's checkpoints: `global_step_N/` folders, their commit marker, and what the controller keeps in them.

A checkpoint is the trainer's state (`actor/` and `critic/`, written by their pools) and the controller's
(`controller.pkl`).
`COMMITTED` is written last; a folder without it is an accident, is never loaded, and is removed at the next start.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_ppo.schema.faults import trimmed

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import TrainerConfig

KEPT_BY_DEFAULT = 3
MARKER = "COMMITTED"
CRITIC = "critic"  # folder of the critic's state in a checkpoint
LATEST = "latest_checkpointed_iteration.txt"  # verl's name for it


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be resumed from."""


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class Checkpoints:
    """All checkpoints of one run folder."""

    def __init__(self, root: Path, keep: int | None, *, keep_critic: int | None = None):
        """`keep` is how many committed checkpoints stay; None keeps all. `keep_critic`, how many of them keep their
        critic; the others can be evaluated and exported, not resumed from."""
        self.root = root
        self.keep = keep
        self.keep_critic = keep_critic

    def folder(self, step: int) -> Path:
        """Where the checkpoint of `step` lies."""
        return self.root / f"global_step_{step}"

    def committed(self) -> list[int]:
        """Steps that have a committed checkpoint, in the order in which they were committed.

        That is not the order of the steps where a run began anew, or went back, in a folder with later checkpoints.
        """
        found = []
        for marker in self.root.glob(f"*/{MARKER}"):
            if match := re.fullmatch(r"global_step_(\d+)", marker.parent.name):
                found.append((marker.stat().st_mtime_ns, int(match[1])))
        return [step for _, step in sorted(found)]

    def newest(self) -> int | None:
        """The step committed last, None before the first commit."""
        steps = self.committed()
        with contextlib.suppress(FileNotFoundError, ValueError):
            if (step := int((self.root / LATEST).read_text())) in steps:
                return step
        return max(steps, default=None)  # copied without that file, and perhaps without its times

    def begin(self, step: int) -> Path:
        """An empty folder for `step`; what an interrupted attempt left there is removed."""
        folder = self.folder(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def commit(self, step: int, controller: dict[str, Any]) -> None:
        """Write the controller's part, then the marker, then let go of the oldest checkpoints.

        Everything else of the checkpoint must be on disk already. Raises CheckpointError when the disk is full or
        cannot be written; older checkpoints are then all still there.
        """
        folder = self.folder(step)
        try:
            _write_synced(folder / "controller.pkl", pickle.dumps(controller, protocol=5))
            _write_synced(folder / MARKER, str(step).encode())
            temporary = self.root / f".{LATEST}"
            _write_synced(temporary, str(step).encode())
            temporary.replace(self.root / LATEST)
        except OSError as error:
            raise self.failed(step, error) from error
        if self.keep:
            for old in self._older_than_newest(step, self.keep):
                (self.folder(old) / MARKER).unlink()  # first, so that a half-deleted folder does not count
                shutil.rmtree(self.folder(old))
        if self.keep_critic:
            for old in self._older_than_newest(step, self.keep_critic):
                shutil.rmtree(self.folder(old) / CRITIC, ignore_errors=True)

    def _older_than_newest(self, step: int, count: int) -> list[int]:
        """All but the `count` checkpoints committed last, of which `step`, just committed, is one."""
        older = [old for old in self.committed() if old != step]
        return older[: max(len(older) + 1 - count, 0)]

    @staticmethod
    def critic(folder: Path) -> Path:
        """Where a checkpoint has its critic. Raises CheckpointError when it has none."""
        if not (folder / CRITIC).is_dir():
            raise CheckpointError(
                f"{folder} holds no critic: it was saved without one, or trainer.max_critic_ckpt_to_keep let go of it. "
                "Resume from a newer checkpoint, or start anew with trainer.resume_mode=disable"
            )
        return folder / CRITIC

    def failed(self, step: int, error: BaseException) -> CheckpointError:
        """The error of a checkpoint that could not be written, with what a person needs to mend it."""
        free = shutil.disk_usage(self.root).free / 2**20
        last = self.newest()
        kept = f"the checkpoint of step {last} is untouched" if last is not None else "there is no earlier checkpoint"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder(step)} ({free:.0f} MiB free there): "
            f"{trimmed(error)}. Make room, or give another trainer.default_local_dir; {kept}"
        )

    def sweep(self) -> list[Path]:
        """Remove folders that were never committed; returns them."""
        committed = {self.folder(step) for step in self.committed()}
        leftovers = [path for path in self.root.glob("global_step_*") if path.is_dir() and path not in committed]
        for path in leftovers:
            shutil.rmtree(path)
        return leftovers

    @staticmethod
    def step_of(folder: Path) -> int:
        """The step of a committed checkpoint, whatever its folder is called."""
        return int((folder / MARKER).read_text())

    @staticmethod
    def load(folder: Path) -> dict[str, Any]:
        """The controller's part of a committed checkpoint. Raises CheckpointError when there is none."""
        if not (folder / MARKER).is_file():
            raise CheckpointError(f"{folder} holds no committed checkpoint (no {MARKER} file in it)")
        try:
            with open(folder / "controller.pkl", "rb") as file:
                return pickle.load(file)
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError) as error:
            raise CheckpointError(
                f"{folder / 'controller.pkl'} cannot be read ({type(error).__name__}: {error}): the checkpoint is "
                "damaged or of another version of this package; name another with trainer.resume_mode=resume_path and "
                "trainer.resume_from_path, or start anew with trainer.resume_mode=disable"
            ) from error

    def to_resume(self, mode: str, path: str | None) -> Path | None:
        """The checkpoint folder that `trainer.resume_mode` asks for, or None to start afresh.

        `auto` takes the newest committed one, `resume_path` the given one, `disable` none.
        """
        if mode == "disable":
            return None
        if mode == "resume_path":
            folder = Path(str(path))
            if not (folder / MARKER).is_file():
                raise CheckpointError(
                    f"trainer.resume_from_path={path} holds no committed checkpoint ({MARKER} is missing)"
                )
            return folder
        step = self.newest()
        return None if step is None else self.folder(step)


def nothing_to_do(trainer: TrainerConfig, resumed: Path, step: int, total_steps: int) -> str | None:
    """What to tell where the checkpoint `resumed`, of `step`, is the run's last.

    None where steps are left, or where validation is all that is asked for.
    """
    if step < total_steps or trainer.val_only:
        return None
    more = "trainer.total_training_steps" if trainer.total_training_steps else "trainer.total_epochs"
    return (
        f"nothing to do: {resumed} holds step {step} of {total_steps}. Raise {more} to train on, or give another "
        "trainer.default_local_dir for a new run"
    )
