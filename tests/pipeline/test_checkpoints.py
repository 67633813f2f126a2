"""Which checkpoint is the newest, which are let go of, and what a full disk or a damaged file leaves."""

from __future__ import annotations

import errno

import pytest

from jaxrl_ppo.pipeline import checkpoints as module
from jaxrl_ppo.pipeline.checkpoints import LATEST, CheckpointError, Checkpoints


def commit(kept: Checkpoints, *steps: int) -> None:
    for step in steps:
        kept.begin(step)
        kept.commit(step, {"step": step})


def test_the_newest_is_the_last_committed_not_the_highest(tmp_path):
    kept = Checkpoints(tmp_path, keep=3)
    commit(kept, 10, 15, 20)
    commit(kept, 5)  # a run that began anew in the same folder
    assert kept.committed() == [15, 20, 5]
    assert kept.to_resume("auto", None) == kept.folder(5)
    commit(kept, 10)
    assert kept.committed() == [20, 5, 10]
    (tmp_path / LATEST).unlink()  # copied by hand, say
    assert kept.to_resume("auto", None) == kept.folder(20)


def test_one_is_kept_and_never_none(tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path, keep=1)
    commit(kept, 1, 2)
    assert kept.committed() == [2]

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    kept.begin(3)
    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step 3 .*No space left.* the checkpoint of step 2 is untouched"):
        kept.commit(3, {"step": 3})
    monkeypatch.undo()
    assert kept.committed() == [2]
    assert kept.sweep() == [kept.folder(3)]
    assert Checkpoints.load(kept.to_resume("auto", None)) == {"step": 2}


def test_a_damaged_controller_file_says_what_to_do(tmp_path):
    kept = Checkpoints(tmp_path, keep=None)
    commit(kept, 1)
    file = kept.folder(1) / "controller.pkl"
    file.write_bytes(file.read_bytes()[:5])
    with pytest.raises(CheckpointError, match=r"damaged.*trainer\.resume_mode=disable"):
        Checkpoints.load(kept.folder(1))
