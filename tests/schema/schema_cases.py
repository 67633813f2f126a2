"""Small real files for configurations to name, and shortcuts to compose and check a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import DictConfig, OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxrl_ppo.schema.faults import ConfigError
from jaxrl_ppo.schema.overrides import given_keys, normalise
from jaxrl_ppo.schema.validate import Checked, validate_config

ROOT = Path(__file__).parents[2]
CONFIG_FOLDER = ROOT / "config"


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model folder `model`, `train.parquet` of 40 rows, `val.jsonl` and `reward.py`."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model" / "model.safetensors").touch()
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "model" / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    row = {"data_source": "arithmetic", "prompt": [{"role": "user", "content": "What is 1 + 1?"}]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 40), folder / "train.parquet")
    (folder / "val.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
    )
    return folder


@pytest.fixture(scope="session")
def needed(files: Path) -> list[str]:
    """Overrides that make the two main configurations complete."""
    return [
        f"actor_rollout_ref.model.path={files / 'model'}",
        f"data.train_files={files / 'train.parquet'}",
        f"data.val_files={files / 'val.jsonl'}",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    ]


def compose_tree(overrides: list[str], name: str = "ppo_trainer") -> DictConfig:
    """What Hydra composes of the tree and `overrides`."""
    with hydra.initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
        return hydra.compose(name, normalise(overrides, CONFIG_FOLDER))


def compose(overrides: list[str], name: str = "ppo_trainer") -> tuple[dict[str, Any], frozenset[str]]:
    """The same, resolved, and the keys that the overrides give."""
    raw: Any = OmegaConf.to_container(compose_tree(overrides, name), resolve=True)
    return raw, given_keys(normalise(overrides, CONFIG_FOLDER))


@pytest.fixture(scope="session")
def check(needed: list[str]) -> Callable[..., Checked]:
    """`check(*overrides, name=…)`: a complete configuration with these overrides, composed and checked."""

    def check_(*overrides: str, name: str = "ppo_trainer") -> Checked:
        return validate_config(*compose([*needed, *overrides], name))

    return check_


@pytest.fixture(scope="session")
def faults(check: Callable[..., Checked]) -> Callable[..., list[str]]:
    """`faults(*overrides)`: the messages of what is wrong then; fails when nothing is."""

    def faults_(*overrides: str, name: str = "ppo_trainer") -> list[str]:
        with pytest.raises(ConfigError) as caught:
            check(*overrides, name=name)
        return [fault.message for fault in caught.value.faults]

    return faults_
