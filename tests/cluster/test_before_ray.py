"""What is told of a run folder before Ray starts: another run's lock, a run that is over, a resume from nothing."""

from __future__ import annotations

import json

import pytest

from jaxrl_ppo import main
from jaxrl_ppo.cluster import launch
from jaxrl_ppo.cluster.before_ray import look_at_run_folder
from jaxrl_ppo.cluster.run_lock import LOCK, run_lock
from jaxrl_ppo.pipeline.checkpoints import CheckpointError, Checkpoints
from jaxrl_ppo.schema.config import Config


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Four epochs of five rows in batches of two, eight steps; Ray must not be started."""

    def start(_):
        raise AssertionError("Ray was started")

    monkeypatch.setattr(launch, "run_ppo", start)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    row = {"data_source": "arithmetic", "prompt": [{"role": "user", "content": "?"}]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 5)
    config = Config()
    config.trainer.default_local_dir = str(tmp_path / "run")
    config.trainer.total_epochs, config.data.train_batch_size = 4, 2
    config.data.train_files = str(tmp_path / "rows.jsonl")
    return config


def commit(folder, step):
    kept = Checkpoints(folder, keep=None)
    kept.begin(step)
    kept.commit(step, {"step": step})


def test_a_run_that_is_over_is_told_so_without_ray(config, tmp_path, capsys):
    commit(tmp_path / "run", 8)
    main.run_ppo(config)
    told = capsys.readouterr().out
    assert told.startswith(f"nothing to do: {tmp_path}/run/global_step_8 holds step 8 of 8. Raise trainer.total_epochs")
    config.trainer.total_training_steps = 9
    with pytest.raises(AssertionError, match="Ray was started"):
        main.run_ppo(config)


async def test_steps_that_are_left_or_not_known_yet_are_for_the_run(config, tmp_path):
    assert await look_at_run_folder(config) is None
    assert not (tmp_path / "run").exists()  # looking leaves nothing behind
    commit(tmp_path / "run", 7)
    assert await look_at_run_folder(config) is None
    config.data.train_max_samples = 3
    assert "holds step 7 of 4" in await look_at_run_folder(config)
    config.data.custom_cls.path = "mine.py"
    assert await look_at_run_folder(config) is None
    config.trainer.total_training_steps = 7
    assert "Raise trainer.total_training_steps" in await look_at_run_folder(config)
    config.trainer.resume_mode = "disable"
    assert await look_at_run_folder(config) is None
    config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", str(tmp_path)
    with pytest.raises(CheckpointError, match=r"trainer\.resume_from_path=.* holds no committed checkpoint"):
        await look_at_run_folder(config)


async def test_a_folder_that_another_run_has_is_refused_and_free_after_it(config, tmp_path, caplog):
    (tmp_path / "run").mkdir()
    async with run_lock(tmp_path / "run"):
        with pytest.raises(CheckpointError, match=r"trainer\.default_local_dir=.*in use by another run that still"):
            await look_at_run_folder(config, wait_s=0)
    assert "waiting for its end" in caplog.text
    assert await look_at_run_folder(config, wait_s=0) is None
    (tmp_path / "run" / LOCK).unlink()
    (tmp_path / "run" / LOCK).mkdir()  # what cannot be opened, whoever asks
    with pytest.raises(CheckpointError, match=r"trainer\.default_local_dir=.*/run: its file \.lock cannot be opened"):
        await look_at_run_folder(config)
