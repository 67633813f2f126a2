"""What is told of a run folder before Ray starts: another run's lock, a run that is over, a resume from nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from jaxrl_ppo import main
from jaxrl_ppo.cluster import launch
from jaxrl_ppo.cluster.before_ray import look_at_run_folder, what_resumes
from jaxrl_ppo.cluster.identity import identity
from jaxrl_ppo.cluster.run_lock import LOCK, run_lock
from jaxrl_ppo.data.rows import DataError, FileRows
from jaxrl_ppo.data.tokenizer import hf_tokenizer
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


@pytest.fixture
def model(tmp_path):
    """A model folder with a tokenizer of three words, as small as they come."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    save_file({"x": np.zeros(4, np.float32)}, folder / "model.safetensors")
    words = Tokenizer(WordLevel({"?": 0, "a": 1, "</s>": 2}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="?")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    return folder


def test_a_dry_run_tells_what_would_be_resumed_or_refused(config, model, tmp_path, capsys):
    config.actor_rollout_ref.model.path = str(model)
    assert what_resumes(config) is None
    rows = FileRows(config.data.train_files, ["prompt"], [], "data.train_files")
    saved = {
        "step": 3,
        "mode": "sync",
        "pending": None,
        "identity": identity(model, hf_tokenizer(model)),
        "prompts": {"data": {"sources": rows.fingerprint(), "data.train_batch_size": 2, "rows": 5}},
    }
    kept = Checkpoints(tmp_path / "run", keep=None)
    kept.begin(3)
    kept.commit(3, saved)
    main.tell_what_resumes(config)
    assert capsys.readouterr().out == f"a run would go on after step 3: {tmp_path}/run/global_step_3\n"
    config.data.train_batch_size = 1
    with pytest.raises(DataError, match=r"not those of the checkpoint: data\.train_batch_size was 2"):
        what_resumes(config)
    config.data.train_batch_size = 2
    save_file({"x": np.ones(4, np.float32)}, model / "model.safetensors")
    with pytest.raises(CheckpointError, match="the model is not the checkpoint's: weights was"):
        what_resumes(config)
    with pytest.raises(SystemExit, match="2"):
        main.tell_what_resumes(config)
    kept.commit(3, saved | {"pending": [], "mode": "one_step_off"})
    with pytest.raises(CheckpointError, match="resume in the mode it was made in"):
        what_resumes(config)
    config.trainer.total_training_steps = 3
    assert "holds step 3 of 3" in str(what_resumes(config))


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
