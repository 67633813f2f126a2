"""Whole runs of the command, on a tiny model and on the real one."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxrl_ppo.observability.run_folder import read_metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with the quickstart's tokenizer: fast, and never right."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    eos = json.loads((smollm2 / "config.json").read_text())["eos_token_id"]
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32: vLLM's CPU attention takes no narrower heads
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=eos,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in smollm2.glob("token*"):
        shutil.copy(file, folder)
    shutil.copy(smollm2 / "generation_config.json", folder)
    return folder


@pytest.fixture(scope="session")
def length_reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward that a random model can get: the share of even token counts among characters, deterministic."""
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(map(ord, solution_str)) % 7 / 7\n"
    )
    return path


@dataclasses.dataclass
class Command:
    """`python -m jaxrl_ppo.main` with the quickstart's configuration, cut down for the tiny model."""

    model: Path
    reward: Path
    folder: Path

    def arguments(self, *overrides: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "jaxrl_ppo.main",
            "--config-name",
            "quickstart",
            f"actor_rollout_ref.model.path={self.model}",
            f"reward.custom_reward_function.path={self.reward}",
            f"trainer.default_local_dir={self.folder}",
            "trainer.logger=[console]",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.n=4",
            "data.max_response_length=16",
            "data.val_max_samples=4",
            "trainer.test_freq=2",
            "trainer.save_freq=-1",
            *overrides,
        ]

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        """The command in a process group of its own."""
        return subprocess.Popen(
            self.arguments(*overrides),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"COLUMNS": "200"},
        )

    def run(self, *overrides: str, code: int = 0) -> str:
        """Run to the end; the output. The exit status must be `code`."""
        process = self.start(*overrides)
        output, _ = process.communicate(timeout=500)
        assert process.returncode == code, output
        return output

    def metrics(self) -> dict[int, dict[str, Any]]:
        """The run's metrics by step."""
        return {row["step"]: row for row in read_metrics(self.folder)}

    def ordinals(self) -> dict[int, list[int]]:
        """By step, the prompt of every sample that was trained on."""
        return {
            int(path.stem.rpartition("_")[2]): [json.loads(line)["ordinal"] for line in path.read_text().splitlines()]
            for path in sorted((self.folder / "samples").glob("rollout_*.jsonl"))
        }


@pytest.fixture
def command(tiny: Path, length_reward: Path, quickstart: Path, tmp_path: Path) -> Command:
    return Command(tiny, length_reward, tmp_path / "run")
