"""The reward model on real Ray processes: scores, and what becomes of a batch when they die or hang."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import ray
import torch
import transformers

from jaxrl_ppo.cluster.pools import Role
from jaxrl_ppo.cluster.reward_model_group import RewardModelGroup
from jaxrl_ppo.cluster.roles import create_resource_pool_manager, create_role_worker_mapping
from jaxrl_ppo.rewards.model import RewardModelLost
from jaxrl_ppo.schema.config import Config

SEQUENCES = [np.arange(3, 3 + length, dtype=np.int32) for length in (4, 9, 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random classifier's folder and its scores of SEQUENCES by transformers."""
    folder = tmp_path_factory.mktemp("group") / "model"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    classifier = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    torch.nn.init.normal_(classifier.score.weight)
    classifier.save_pretrained(folder)
    with torch.no_grad():
        scores = [classifier(torch.tensor(ids[None], dtype=torch.long)).logits.item() for ids in SEQUENCES]
    return folder, scores


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


async def test_a_death_costs_a_start_and_two_in_a_row_the_batch(cluster, model):
    folder, expected = model
    config = Config()
    config.trainer.device, config.trainer.nnodes, config.trainer.n_gpus_per_node = "cpu", 1, 1
    config.actor_rollout_ref.rollout.device, config.actor_rollout_ref.rollout.tensor_model_parallel_size = "cpu", 1
    config.actor_rollout_ref.rollout.nnodes = config.actor_rollout_ref.rollout.n_gpus_per_node = 1
    config.actor_rollout_ref.actor.fsdp_config.dtype = "float32"
    settings = config.reward.reward_model
    settings.enable = settings.enable_resource_pool = True
    settings.nnodes, settings.n_gpus_per_node = 1, 2
    mapping = create_role_worker_mapping(config)
    pools = create_resource_pool_manager(config, mapping)
    pools.create(60)
    faults = []
    group = RewardModelGroup(
        config,
        pools,
        mapping[Role.RewardModel],
        model_folder=str(folder),
        trainers=None,
        on_fault=lambda name, message: faults.append((name, message)),
    )
    try:
        await group.start()
        np.testing.assert_allclose(await group.score(SEQUENCES), expected, rtol=1e-4, atol=1e-5)
        assert not faults

        dying = asyncio.create_task(group.score(SEQUENCES))
        ray.kill(group._workers.actors[0])
        np.testing.assert_allclose(await dying, expected, rtol=1e-4, atol=1e-5)
        ((name, message),) = faults
        assert name == "reward_model_failed"
        assert "a process of the reward_pool died during score_sequences" in message

        config.trainer.deadlines.scoring_s = 1e-4  # nothing is so fast
        group._workers.deadlines = config.trainer.deadlines
        with pytest.raises(RewardModelLost, match=r"gave up waiting for score_sequences on the 1 process.*, twice"):
            await group.score(SEQUENCES)
        assert len(faults) == 3
    finally:
        pools.close()
