"""A run over several Ray nodes: TPU hosts train, GPU hosts generate; what is validated is what is exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from ray.cluster_utils import Cluster
from transformers import AutoTokenizer

from jaxrl_ppo.observability.timeline import read_spans

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster():
    """A head, two TPU hosts and a GPU host, on this machine's CPU."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for resources, gpus in (({"TPU": 1}, 0), ({"TPU": 1}, 0), ({}, 2)):
        cluster.add_node(num_cpus=2, num_gpus=gpus, resources=resources)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def test_tpu_hosts_train_and_gpu_hosts_generate_and_the_last_validation_is_of_the_export(command, cluster, tmp_path):
    command.run(
        f"ray_kwargs.ray_init.address={cluster.address}",
        "+ray_kwargs.ray_init.runtime_env.env_vars={JAXRL_PPO_EMULATE: '1'}",
        "trainer.mode=async",
        "trainer.device=tpu",
        "trainer.nnodes=2",
        "actor_rollout_ref.rollout.device=cuda",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.over_sample_rate=1",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    )
    metrics = command.metrics()
    assert all(metrics[step]["training/staleness"] <= 1 for step in (1, 2, 3))
    trained = sorted(ordinal for step in command.ordinals().values() for ordinal in step)
    assert trained == [ordinal for ordinal in range(12) for _ in range(4)]

    # The last validation again, from the exported folder, by transformers' tokenizer and an engine of its own.
    exported = command.folder / "global_step_3" / "huggingface"
    (file,) = (command.folder / "samples").glob("validation_*3.jsonl")
    seen = [json.loads(line) for line in file.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(exported)
    rows = pq.read_table(ROOT / ".quickstart" / "val.parquet").to_pylist()[: len(seen)]
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False) for row in rows
    ]
    files = (tmp_path / "prompts.json", tmp_path / "answers.json")
    files[0].write_text(json.dumps(prompts))
    subprocess.run(
        [sys.executable, Path(__file__).with_name("answers.py"), "jax", exported, *files, "16"],
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    answers = json.loads(files[1].read_text())
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    assert texts == [row["response"] for row in sorted(seen, key=lambda row: row["ordinal"])]
    accuracy = sum(sum(map(ord, text)) % 7 / 7 for text in texts) / len(texts)
    (reported,) = (value for name, value in metrics[3].items() if name.startswith("val-core/"))
    assert reported == pytest.approx(accuracy, abs=1e-6)


def test_trainer_and_rollouts_take_turns_on_the_same_devices(command, cluster):
    command.run(
        f"ray_kwargs.ray_init.address={cluster.address}",
        "+ray_kwargs.ray_init.runtime_env.env_vars={JAXRL_PPO_EMULATE: '1'}",
        "trainer.mode=sync",
        "actor_rollout_ref.hybrid_engine=true",
        "trainer.device=cuda",  # the cluster has two, so there is no room for a rollout pool beside the trainer's
        "trainer.n_gpus_per_node=2",
        "rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.dtype=float32",
        "algorithm.rollout_correction.bypass_mode=false",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
    )
    metrics = command.metrics()
    for step in (1, 2):  # awake again, the engine computes with the weights just trained
        assert metrics[step]["rollout_corr/log_ppl_abs_diff"] < 1e-5
    spans = {span.name: span.start for span in read_spans(command.folder / "timeline.json") if span.step == 2}
    assert spans["gen"] < spans["sleep"] < spans["update_actor"] < spans["stage_weights"]
