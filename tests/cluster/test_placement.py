"""Pools on a real Ray cluster of several nodes that claim TPUs and GPUs; the processes run on CPU underneath."""

from __future__ import annotations

import pytest
import ray
from ray.cluster_utils import Cluster

from jaxrl_ppo.cluster.pools import PlacementError, Role
from jaxrl_ppo.cluster.roles import create_resource_pool_manager, create_role_worker_mapping
from jaxrl_ppo.schema.config import Config


@ray.remote
class Where:
    """Says which node it is on."""

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def gpus(self) -> list[str]:
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]


@pytest.fixture(scope="module")
def nodes():
    """Two TPU hosts of 4 chips, a third with another name, and a GPU host of 2: name → node id."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    added = {
        name: cluster.add_node(num_cpus=4, num_gpus=gpus, resources=resources)
        for name, gpus, resources in (
            ("tpu 0", 0, {"TPU": 4, "slice-a": 1}),
            ("tpu 1", 0, {"TPU": 4, "slice-a": 1}),
            ("tpu 2", 0, {"TPU": 4, "slice-b": 1}),
            ("gpu 0", 2, {}),
        )
    }
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    cluster.wait_for_nodes()
    yield {name: node.node_id for name, node in added.items()}
    ray.shutdown()
    cluster.shutdown()


def make_config(**rollout) -> Config:
    config = Config()
    config.algorithm.adv_estimator = "grpo"
    config.actor_rollout_ref.hybrid_engine = False
    trainer = config.trainer
    trainer.device, trainer.nnodes, trainer.n_gpus_per_node = "tpu", 2, 4
    trainer.node_resource = "slice-a"
    settings = {"device": "cuda", "nnodes": 1, "n_gpus_per_node": 2, "tensor_model_parallel_size": 1} | rollout
    for name, value in settings.items():
        setattr(config.actor_rollout_ref.rollout, name, value)
    return config


def pools_of(config: Config):
    return create_resource_pool_manager(config, create_role_worker_mapping(config))


def test_trainers_go_to_their_tpu_slice_and_rollouts_to_the_gpus(nodes):
    pools = pools_of(make_config())
    pools.create(60)
    places = {}
    for role, count in ((Role.Actor, 2), (Role.Rollout, 2)):
        workers = [Where.options(**pools.options(role, process)).remote() for process in range(count)]
        places[role] = ray.get([worker.node.remote() for worker in workers], timeout=60)
    pools.close()
    assert set(places[Role.Actor]) == {nodes["tpu 0"], nodes["tpu 1"]}
    assert places[Role.Rollout] == [nodes["gpu 0"]] * 2


def test_replicas_that_take_turns_go_where_the_trainers_are_and_claim_nothing(nodes):
    config = make_config(n_gpus_per_node=2, tensor_model_parallel_size=1)
    config.actor_rollout_ref.hybrid_engine = True
    config.trainer.device, config.trainer.nnodes, config.trainer.n_gpus_per_node = "cuda", 1, 2
    config.trainer.node_resource = None
    pools = pools_of(config)
    assert pools.devices == 2
    pools.check(ray.nodes())
    pools.create(60)
    trainer = Where.options(**pools.options(Role.Actor, 0)).remote()
    replicas = [Where.options(**pools.options(Role.Rollout, process)).remote() for process in range(2)]
    places = ray.get([worker.node.remote() for worker in (trainer, *replicas)], timeout=60)
    assert places == [nodes["gpu 0"]] * 3
    assert sorted(ray.get(trainer.gpus.remote())) == ["0", "1"]
    assert [pools.host_of(Role.Rollout, process) for process in range(2)] == [(0, slice(0, 1)), (0, slice(1, 2))]
    pools.close()

    config.trainer.n_gpus_per_node = config.actor_rollout_ref.rollout.n_gpus_per_node = 4
    with pytest.raises(PlacementError, match=r"'trainer_pool' lacks GPU \(4 needed, 2 left.*shared with the rollout\)"):
        pools_of(config).check(ray.nodes())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"n_gpus_per_node": 3}, r"pool 'rollout_pool' lacks GPU \(1 needed, 0 left .*\.n_gpus_per_node.*process 2"),
        ({"device": "npu"}, r"pool 'rollout_pool' lacks NPU \(1 needed, 0 left on the node with most\)"),
        ({"device": "tpu", "n_gpus_per_node": 8, "tensor_model_parallel_size": 8}, r"lacks TPU \(8 needed, 4 left"),
        ({"node_resource": "slice-c"}, r"pool 'rollout_pool' lacks slice-c \(0\.001 needed, 0 left"),
        (
            {"node_resource": "slice-b"},
            r"lacks a node that has \{'GPU': 1\.0, 'CPU': 1\.0, 'slice-b': 0\.001\} at once",
        ),
    ],
)
def test_an_error_says_which_pool_lacks_what(nodes, settings, told):
    with pytest.raises(PlacementError, match=told):
        pools_of(make_config(**settings)).check(ray.nodes())


def test_what_any_cpu_will_do_for_takes_no_place_beside_the_gpus():
    config = make_config()
    config.trainer.device, config.trainer.nnodes, config.trainer.n_gpus_per_node = "cpu", 1, 1
    config.trainer.node_resource = None
    both, bare = ({"Alive": True, "Resources": {"CPU": 2.0, **gpus}} for gpus in ({"GPU": 2.0}, {}))
    pools_of(config).check([both, bare])
    with pytest.raises(PlacementError, match="pool 'trainer_pool' lacks CPU"):
        pools_of(config).check([both])
