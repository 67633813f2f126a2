"""The real model after two steps: every engine, and transformers, answer alike from the exported folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401 - numpy learns "bfloat16" from it
import numpy as np
import orbax.checkpoint as ocp
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from jaxrl_ppo.models.config import load_decoder_config
from jaxrl_ppo.models.parameters import flatten
from jaxrl_ppo.models.tensor_plan import tensor_plan

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def trained(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint after two steps of the quickstart, with the exported folder in it."""
    folder = tmp_path_factory.mktemp("trained")
    command = [sys.executable, "-m", "jaxrl_ppo.main", "--config-name", "quickstart"]
    settings = [
        f"trainer.default_local_dir={folder}",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=2",
        "trainer.logger=[console]",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.rollout.dtype=bfloat16",  # which the export takes over
    ]
    done = subprocess.run([*command, *settings], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "global_step_2"


def test_exported_tensors_are_the_trainers_parameters_cast(trained, smollm2):
    config = load_decoder_config(smollm2)
    params = dict(flatten(ocp.StandardCheckpointer().restore((trained / "actor" / "model").absolute())))
    exported = {}
    for file in (trained / "huggingface").glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            exported |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    plan = tensor_plan(config)
    assert exported.keys() == plan.keys()
    for name, entry in plan.items():
        block = np.asarray(params[entry.parameter])[entry.index]
        cast = entry.to_tensor(block).astype("bfloat16")
        assert np.array_equal(exported[name].view(np.uint16), cast.view(np.uint16)), name
    with safe_open(smollm2 / "model.safetensors", "numpy") as before:
        name = "model.layers.3.mlp.up_proj.weight"
        assert not np.array_equal(before.get_tensor(name).view(np.uint16), exported[name].view(np.uint16))


def test_every_engine_answers_as_transformers_does(trained, quickstart, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained / "huggingface"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    messages = pq.read_table(quickstart / "val.parquet").column("prompt").to_pylist()[:8]
    prompts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]
    expected = []
    for ids in prompts:
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS)
        expected.append(out[0, len(ids) :].tolist())
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    for engine in ("jax", "vllm"):
        command = [sys.executable, Path(__file__).with_name("answers.py"), engine, folder]
        subprocess.run(
            [*command, tmp_path / "prompts.json", tmp_path / engine, str(NEW_TOKENS)],
            check=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        )
        assert json.loads((tmp_path / engine).read_text()) == expected, engine
