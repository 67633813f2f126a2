"""The reward model's settings: rules, the folder it names, the table, keys without an effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    assert note == f"no effect here: {KEY}.weight ({KEY}.enable=false, or it is a judge)"
    (note,) = check(f"{KEY}.enable=true", judge, f"{KEY}.nnodes=2").notes
    assert note == f"no effect here: {KEY}.nnodes ({KEY}.enable_resource_pool=false)"


@pytest.fixture(scope="module")
def served(files: Path) -> list[str]:
    """The settings of a generative judge that a reward function asks."""
    return [
        f"{KEY}.enable=true",
        f"{KEY}.enable_resource_pool=true",
        f"{KEY}.nnodes=2",
        f"{KEY}.n_gpus_per_node=4",
        f"{KEY}.model_path={files / 'model'}",
        f"{KEY}.rollout.name=vllm",
        f"{KEY}.rollout.tensor_model_parallel_size=2",
        f"reward.custom_reward_function.path={files / 'reward.py'}",
    ]


def test_a_judge_that_is_served(check: Callable[..., Checked], served: list[str]) -> None:
    checked = check(*served, f"+{KEY}.rollout.top_k=1", f"{KEY}.weight=2")
    text = table.render(checked.config)
    assert "reward.py, which asks the judge" in text
    assert "2 nodes x 4; a judge, 4 servers of 2 devices each; engine: vllm, bfloat16" in text
    assert checked.config.reward.reward_model.rollout.max_model_len == 4096
    (note,) = checked.notes
    assert f"{KEY}.rollout.top_k (the requests of the reward function decide)" in note
    assert f"{KEY}.weight ({KEY}.enable=false, or it is a judge)" in note


def test_as_in_verl_a_served_model_that_no_function_asks_is_a_classifier(
    check: Callable[..., Checked], faults: Callable[..., list[str]], served: list[str], judge: str, tmp_path: Path
) -> None:
    alone = served[:-1]
    checked = check(*alone, judge)
    assert "1 x the reward model" in table.render(checked.config)
    (note,) = checked.notes
    assert f"{KEY}.rollout.name (no reward function asks a judge" in note
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").touch()
    (fault,) = faults(*alone, f"{KEY}.model_path={tmp_path}")
    assert "for a judge, name the reward function that asks it" in fault


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{KEY}.enable_resource_pool=false"], "the judge's servers need devices of their own"),
        ([f"{KEY}.rollout.pipeline_model_parallel_size=4"], "does not hold whole servers of 8 devices"),
        ([f"{KEY}.rollout.expert_parallel_size=3"], "is more than the 2 devices of a server"),
        ([f"{KEY}.rollout.enable_chunked_prefill=false", f"{KEY}.rollout.max_num_batched_tokens=99"], "is less than"),
        ([f"+{KEY}.rollout.engine_kwargs.vllm={{served-model-name: x}}"], "served_model_name cannot be set"),
        ([f"{KEY}.rollout.name=sglang"], f"{KEY}.rollout.name=sglang: must be"),
        ([f"{KEY}.model_path=/nowhere"], f"{KEY}.model_path=/nowhere: there is no such folder"),
        ([f"{KEY}.model_path=null"], f"{KEY}.model_path must be given with {KEY}.enable=true: the judge"),
        ([f"{KEY}.nnodes=0"], "the pool has no devices"),
    ],
)
def test_a_judges_faults(faults: Callable[..., list[str]], served: list[str], overrides: list[str], words: str) -> None:
    found = faults(*served, *overrides)
    assert any(words in text for text in found), found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "is a sequence classifier, and"),
        ({"max_position_embeddings": 99}, f"{KEY}.rollout.max_model_len=4096 is more than the 99 positions"),
    ],
)
def test_a_model_that_cannot_be_the_judge(
    faults: Callable[..., list[str]], served: list[str], tmp_path: Path, content: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of vLLM's own", **content}))
    (tmp_path / "model.safetensors").touch()
    (fault,) = faults(*served, f"{KEY}.model_path={tmp_path}")
    assert words in fault
