"""The reward model's settings: rules, the folder it names, the table, keys without an effect."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from jaxrl_ppo.schema import sizes, table
from jaxrl_ppo.schema.validate import Checked

KEY = "reward.reward_model"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The setting that names a folder with a classifier's config.json."""
    folder = tmp_path_factory.mktemp("judge")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "id2label": {"0": "LABEL_0"}}))
    (folder / "model.safetensors").touch()
    return f"{KEY}.model_path={folder}"


def test_alone_and_beside_a_function(check: Callable[..., Checked], judge: str) -> None:
    text = table.render(check(f"{KEY}.enable=true", judge).config)
    assert "1 x the reward model" in text
    assert "the trainer's devices" in text
    beside = [f"{KEY}.enable=true", judge, f"{KEY}.weight=0.5", "+reward.functions.rule={weight: 2}"]
    pool = [f"{KEY}.enable_resource_pool=true", f"{KEY}.nnodes=2", f"{KEY}.n_gpus_per_node=4"]
    config = check(*beside, *pool).config
    assert "2 x rule + 0.5 x the reward model" in table.render(config)
    assert "2 nodes x 4" in table.render(config)
    assert sizes.reward_model_devices(config) == 8


def test_verls_older_spellings(check: Callable[..., Checked], judge: str) -> None:
    path = judge.partition("=")[2]
    older = ["enable=true", f"model.path={path}", "forward_max_token_len_per_gpu=4096", "model.input_tokenizer=x"]
    config = check(*(f"+reward_model.{setting}" for setting in older)).config
    settings = config.reward.reward_model
    assert (settings.enable, settings.model_path, settings.forward_max_token_len_per_gpu) == (True, path, 4096)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], f"{KEY}.model_path must be given"),
        ([f"{KEY}.model_path=/nowhere"], f"{KEY}.model_path=/nowhere: there is no such folder"),
        (["JUDGE", f"{KEY}.enable_resource_pool=true"], "the pool has no devices"),
        (["JUDGE", f"{KEY}.forward_max_token_len_per_gpu=100"], "holds less than one longest sample"),
        (["JUDGE", "+reward.functions.reward_model={}"], "reward.functions.reward_model: this name is"),
    ],
)
def test_faults(faults: Callable[..., list[str]], judge: str, overrides: list[str], words: str) -> None:
    found = faults(f"{KEY}.enable=true", *(judge if text == "JUDGE" else text for text in overrides))
    assert any(words in text for text in found), found


def test_a_classifier_of_several_labels(faults: Callable[..., list[str]], tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").touch()
    (fault,) = faults(f"{KEY}.enable=true", f"{KEY}.model_path={tmp_path}")
    assert "config.json has 2 labels" in fault


def test_settings_of_one_that_is_not_there_are_told(check: Callable[..., Checked], judge: str) -> None:
    (note,) = check(f"{KEY}.weight=2").notes
    assert note == f"no effect here: {KEY}.weight ({KEY}.enable=false)"
    (note,) = check(f"{KEY}.enable=true", judge, f"{KEY}.nnodes=2").notes
    assert note == f"no effect here: {KEY}.nnodes ({KEY}.enable_resource_pool=false)"
