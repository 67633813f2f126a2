"""Files that a configuration names are looked at before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_ppo.schema.faults import ConfigError
from jaxrl_ppo.schema.validate import Checked, validate_config

MODEL = "actor_rollout_ref.model.path"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no config.json, so it is no Hugging Face model folder."),
        ("{", "is not readable as JSON"),
        ("{}", "has no model_type."),
    ],
)
def test_model_folder(faults: Callable[..., list[str]], tmp_path: Path, content: str | None, message: str) -> None:
    (tmp_path / "model.safetensors").touch()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    (found,) = faults(f"{MODEL}={tmp_path}")
    assert found.startswith(MODEL)
    assert message in found


def test_model_without_weights(faults: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "holds no *.safetensors file" in faults(f"{MODEL}={tmp_path}")[0]


def test_model_that_is_not_there(faults: Callable[..., list[str]], files: Path) -> None:
    assert faults(f"{MODEL}=/no/such/model") == [f"{MODEL}=/no/such/model: there is no such folder."]
    assert "is a file" in faults(f"{MODEL}={files / 'reward.py'}")[0]
    assert "examples/quickstart/prepare.py" in faults(f"{MODEL}=.quickstart/none")[0]


def test_hub_ids_and_addresses_are_left_to_the_run(check: Callable[..., Checked]) -> None:
    for path in ("Qwen/Qwen3-0.6B", "gpt2", "s3://bucket/model"):
        assert check(f"{MODEL}={path}").config


def test_architecture(files: Path) -> None:
    raw = {
        "actor_rollout_ref": {"model": {"path": str(files / "model")}, "actor": {"ppo_mini_batch_size": 8}},
        "data": {"train_files": [str(files / "train.parquet")], "train_batch_size": 8},
        "algorithm": {"adv_estimator": "grpo"},
    }
    assert validate_config(raw, model_types=["llama", "qwen2"]).config
    with pytest.raises(ConfigError, match="the architecture 'llama' is not supported; supported: mamba, qwen2"):
        validate_config(raw, model_types=["qwen2", "mamba"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x", "must end in one of .parquet, .json, .jsonl"),
        ("a.jsonl", None, "there is no such file"),
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", "\n \n", "has no rows"),
        ("a.json", "[\n]", "has no rows"),
        ("a.jsonl", '{"question": 1}\n', "has no column 'prompt' (data.prompt_key); it has question"),
        ("a.jsonl", "prompt: x", "is not readable as jsonl"),
        ("a.json", '[["x"]]', "the first row is a list, not an object"),
        ("a.json", '[{"question": ', "is not readable as json"),
        ("a.parquet", "PAR1", "is not readable as parquet"),
    ],
)
def test_data_file(
    faults: Callable[..., list[str]], tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    for key in ("data.train_files", "data.val_files"):
        found = faults(f"{key}=[{tmp_path / name}]")
        assert any(text.startswith(f"{key}: {tmp_path / name}: ") and message in text for text in found), found


def test_parquet_columns_and_rows(
    faults: Callable[..., list[str]], check: Callable[..., Checked], tmp_path: Path
) -> None:
    file = tmp_path / "q.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["?"] * 10}), file)
    assert "has no column 'prompt' (data.prompt_key); it has question" in faults(f"data.train_files={file}")[0]
    assert "have 10 rows, less than one step's data.train_batch_size=16" in " ".join(
        faults(f"data.train_files={file}", "data.prompt_key=question", "data.val_files=null")
    )
    assert check(f"data.train_files=[{file},{file}]", "data.prompt_key=question", "data.val_files=null")


def test_a_parquet_file_without_rows_is_named(faults: Callable[..., list[str]], tmp_path: Path) -> None:
    file = tmp_path / "none.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), file)
    for key in ("data.train_files", "data.val_files"):
        assert faults(f"{key}={file}") == [f"{key}: {file}: has no rows."]


def test_faults_of_files_are_told_with_those_of_other_keys(faults: Callable[..., list[str]], tmp_path: Path) -> None:
    file = tmp_path / "none.parquet"
    assert len(faults("data.prompt_key=[1]", f"data.train_files={file}", f"{MODEL}=/no/model", "trainer.nnodes=0")) == 4


def test_validation_with_training_rows_is_noted(check: Callable[..., Checked], files: Path) -> None:
    train = files / "train.parquet"
    (note,) = check(f"data.val_files=[{files / 'val.jsonl'},{files / 'model' / '..' / 'train.parquet'}]").notes
    assert note.startswith(f"data.val_files: {files / 'model' / '..' / 'train.parquet'} is a training file too")
    assert train.is_file()
    assert not check(f"data.val_files={files / 'val.jsonl'}").notes


def test_models_of_the_hub_are_noted_whatever_reads_them(check: Callable[..., Checked]) -> None:
    notes = check(
        f"{MODEL}=models/none",
        "actor_rollout_ref.model.tokenizer_path=models/words",
        "critic.enable=true",
        "critic.model.path=models/critic",
        "reward.reward_model.enable=true",
        "reward.reward_model.model_path=models/judge",
    ).notes
    assert [note.split(":")[0] for note in notes] == [
        f"{MODEL}=models/none",
        "actor_rollout_ref.model.tokenizer_path=models/words",
        "critic.model.path=models/critic",
        "reward.reward_model.model_path=models/judge",
    ]
    assert all("no such folder here, so it is looked for on the Hugging Face Hub" in note for note in notes)


def test_json_rows_longer_than_the_head(check: Callable[..., Checked], tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    file.write_text(json.dumps([{"prompt": "x" * 3_000_000}]))
    assert check(f"data.val_files={file}").config


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "there is no such file"),
        ("def other(): pass", "defines no 'compute_score'; it defines other"),
        ("def compute_score(:", "is not valid Python, line 1"),
    ],
)
def test_reward_function(faults: Callable[..., list[str]], tmp_path: Path, code: str | None, message: str) -> None:
    file = tmp_path / "r.py"
    if code is not None:
        file.write_text(code)
    (found,) = faults(f"reward.custom_reward_function.path={file}")
    assert found.startswith(f"reward.custom_reward_function: {file}: ")
    assert message in found


@pytest.mark.parametrize(
    "code",
    [
        "async def compute_score(**kwargs): return 0.0",
        "from math import sqrt as compute_score",
        "compute_score = lambda *a, **k: 0.0",
        "try:\n    import nothing\nexcept ImportError:\n    def compute_score(*a): return 0.0",
        "from math import *",
        "raise RuntimeError('parsed, never run')\ndef compute_score(): pass",
    ],
)
def test_reward_functions_that_parsing_finds(check: Callable[..., Checked], tmp_path: Path, code: str) -> None:
    (tmp_path / "r.py").write_text(code)
    assert check(f"reward.custom_reward_function.path={tmp_path / 'r.py'}").config


def test_users_estimator_and_loss(check: Callable[..., Checked], faults: Callable[..., list[str]], files: Path) -> None:
    ours = files / "reward.py"
    assert check(f"algorithm.adv_estimator={ours}:compute_score").config
    assert "defines no 'nope'" in faults(f"algorithm.adv_estimator={ours}:nope")[0]
    assert "there is no such file" in faults("actor_rollout_ref.actor.policy_loss.loss_mode=x.py:f")[0]
    assert "defines no 'A'" in faults(f"data.sampler.class_path={ours}", "data.sampler.class_name=A")[0]


def test_resume_path(faults: Callable[..., list[str]], check: Callable[..., Checked], tmp_path: Path) -> None:
    resume = "trainer.resume_mode=resume_path"
    assert "there is no such folder" in faults(resume, f"trainer.resume_from_path={tmp_path / 'global_step_3'}")[0]
    assert check(resume, f"trainer.resume_from_path={tmp_path}").config
