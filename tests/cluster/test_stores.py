"""A weight store whose process dies, on a real Ray node: what was on its way to it is told to be lost."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from jaxrl_ppo.cluster.deaths import GONE
from jaxrl_ppo.cluster.staging import stage
from jaxrl_ppo.cluster.stores import StoreFailed, StoreLost, WeightStores
from jaxrl_ppo.weights.manifest import NotBegunError
from jaxrl_ppo.weights.reader import read_tensors

TENSORS = {"a": np.arange(6, dtype=np.float32)}


@pytest.fixture(scope="module")
def two_nodes():
    """A cluster with a node beside its head."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    other = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster, other
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def node(two_nodes):
    """The driver's own node."""
    return ray.get_runtime_context().get_node_id()


def process_of(store) -> int:
    """Waits for a store that is being restarted."""
    for _ in range(300):
        try:
            return ray.get(store.__ray_call__.remote(lambda self: os.getpid()))
        except GONE:
            time.sleep(0.1)
    raise AssertionError("the store did not come back")


async def test_a_store_that_dies_is_told_of_and_loses_no_committed_version(node, tmp_path):
    stores = WeightStores(str(tmp_path), 60)
    await stores.add(node)
    (store,) = stores.by_node.values()

    def put(version):
        ray.get([store.begin.remote(version), store.put.remote(version, TENSORS)])

    def kill():
        os.kill(process_of(store), signal.SIGKILL)
        return process_of(store)

    put(1)
    first, restarted = await stores.commit(1, stores.by_node)
    assert not restarted
    kill()
    put(2)
    _, restarted = await stores.commit(2, stores.by_node)
    assert restarted
    put(3)
    kill()
    with pytest.raises(StoreLost, match="died before it committed version 3"):
        await stores.commit(3, stores.by_node)
    put(3)
    third, _ = await stores.commit(3, stores.by_node)
    assert os.listdir(os.path.dirname(third.folder)).count(os.path.basename(third.folder)) == 1
    assert third.folder != first.folder
    await stores.close()
    assert not os.path.exists(os.path.dirname(third.folder))


async def test_files_written_into_a_near_store_and_buckets_sent_to_a_far_one_are_the_same_version(node, tmp_path):
    """And what takes both ways is the same to the byte; a version whose store dies on the way is told to be lost."""
    stores = WeightStores(str(tmp_path), 60)
    await stores.add(node)
    (store,) = stores.by_node.values()
    buckets = [{name: np.arange(size, dtype=np.float32)} for name, size in (("a", 6), ("b", 3), ("c", 1))]
    read = {}
    for at in (node, "another node"):
        stage(buckets, {at: store}, 1)
        manifest, _ = await stores.commit(1, stores.by_node)
        read[at] = manifest.tensors, {name: array.tolist() for name, array in read_tensors(manifest)}
    assert read[node] == read["another node"]
    assert read[node][1] == {name: array.tolist() for bucket in buckets for name, array in bucket.items()}

    iterated = []

    def killed_on_the_way():
        for number, bucket in enumerate(buckets):
            iterated.append(number)
            yield bucket
            if number == 0:
                os.kill(process_of(store), signal.SIGKILL)
                process_of(store)

    with pytest.raises((*GONE, NotBegunError)) as lost:
        stage(killed_on_the_way(), stores.by_node, 2)
    assert isinstance(getattr(lost.value, "cause", lost.value), (*GONE, NotBegunError))
    assert iterated == [0, 1, 2]
    await stores.close()


async def test_a_store_that_cannot_be_made_is_told_of_with_its_cause_and_not_waited_for(node, tmp_path):
    stores = WeightStores(str(tmp_path), 60)
    stores._root = "/proc/a-store"  # where nothing can be written
    with pytest.raises(StoreFailed, match=rf"^the weight store of node {node} does not start: FileNotFoundError: .*"):
        await stores.add(node)
    assert stores.by_node == {}


def ask_until_gone(store):
    """Its process ends a little after its node."""
    while True:
        ray.get(store.begin.remote(2))


async def test_a_store_whose_node_leaves_is_let_go_of(two_nodes, tmp_path):
    cluster, other = two_nodes
    stores = WeightStores(str(tmp_path), 60)
    await stores.add(other.node_id)
    (store,) = stores.by_node.values()
    ray.get([store.begin.remote(1), store.put.remote(1, TENSORS)])
    await stores.commit(1, stores.by_node)
    assert await stores.settle() == []
    cluster.remove_node(other, allow_graceful=False)
    with pytest.raises(GONE):
        ask_until_gone(store)
    assert await stores.settle() == [other.node_id]
    assert stores.by_node == {}
    with pytest.raises(StoreLost, match="every node that had one has left the cluster"):
        await stores.add(ray.get_runtime_context().get_node_id())
