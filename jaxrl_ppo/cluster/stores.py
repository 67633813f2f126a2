"""The weight stores of the rollout nodes: an actor on each, started with its first replica, restarted if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jaxrl_ppo.cluster.deaths import GONE, cause_of, failed_to_start
from jaxrl_ppo.cluster.rollout_worker import StoreWorker
from jaxrl_ppo.rollout.deadline import within
from jaxrl_ppo.weights.manifest import NotBegunError, WeightManifest


def store_root(run_folder: str) -> str:
    """Where a rollout node keeps weights: shared memory, in a folder that belongs to the run folder alone.

    A run that is started again finds, and clears, what a crashed one left behind.
    """
    digest = hashlib.sha256(str(Path(run_folder).absolute()).encode()).hexdigest()[:16]
    return f"/dev/shm/jaxrl_ppo-{os.getuid()}-{digest}"


LOOK_S, ANSWER_S = 0.5, 5.0  # between looks at stores that do not answer; in which one that lives has answered


class StoreLost(RuntimeError):
    """A weight store died while it was given a version, which must be given again; or there is none left."""


class StoreFailed(RuntimeError):
    """A weight store that does not start, for a reason that another attempt would meet again."""


class WeightStores:
    """Node → store. A store that dies is restarted by Ray, in the same folder; committed versions outlive it there."""

    def __init__(self, run_folder: str, deadline_s: float):
        self._root, self._deadline_s = store_root(run_folder), deadline_s
        self._stores: dict[str, Any] = {}
        self._newest: WeightManifest | None = None
        self._commits = 0
        self._adding = asyncio.Lock()  # of several replicas on one node, the first brings its store

    @property
    def by_node(self) -> dict[str, Any]:
        """The stores that a version has to be put into now."""
        return dict(self._stores)

    async def add(self, node: str) -> None:
        """Have a store on `node`; one that comes late gets the newest version from another.

        Raises StoreLost when there was a version, and is no store any more, and StoreFailed when the store cannot be.
        """
        async with self._adding:
            if node not in self._stores:
                await self._add(node)

    async def _add(self, node: str) -> None:
        if self._newest is not None:
            await self.settle()
            self.check_any_left()
        store_class: Any = StoreWorker  # a Ray actor class, which no type checker sees
        store = store_class.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            self._root
        )
        what = f"the weight store of node {node} to start (trainer.deadlines.weights_s)"
        await within(self._until_up(node, store), self._deadline_s, what)
        if self._newest is not None:
            await self._copy(node, store)
        self._stores[node] = store

    async def commit(self, version: int, stores: dict[str, Any]) -> tuple[WeightManifest, bool]:
        """Make `version`, which was put into all of `stores`, the newest everywhere; the same path on every node.

        Also tells whether a store had been restarted since its last commit. Raises StoreLost when one is gone, or was
        since the version was put into it.
        """
        # Larger than what a crashed run left in some node's store: folders are named after it, and sorted by it.
        self._commits = number = max(self._commits + 1, int(time.time()))
        commits = asyncio.gather(*(store.commit.remote(version, number) for store in stores.values()))
        try:
            committed = await within(
                commits, self._deadline_s, "the weight stores to commit (trainer.deadlines.weights_s)"
            )
        except (*GONE, NotBegunError) as error:
            raise StoreLost(f"a weight store died before it committed version {version}: {cause_of(error)}") from error
        self._newest = committed[0][0]
        for node in self._stores.keys() - stores.keys():  # came while the version was on its way
            await self._copy(node, self._stores[node])
        return self._newest, any(restarted for _, restarted in committed)

    async def _copy(self, node: str, store: Any) -> None:
        assert self._newest is not None
        source = next(other for at, other in sorted(self._stores.items()) if at != node)
        what = f"weight version {self._newest.version} to be copied to node {node} (trainer.deadlines.weights_s)"
        await within(store.copy.remote(source, self._newest), self._deadline_s, what)

    async def _until_up(self, node: str, store: Any) -> None:
        """Wait until a store answers, or its node has left: what is put into it tells that, as of any other."""
        while node in _alive() and not await _answers(node, store):
            await asyncio.sleep(LOOK_S)

    async def settle(self) -> list[str]:
        """Wait until each store answers, or its node has left the cluster; lets go of the latter, and returns them.

        Ray restarts a store that has died, and takes up to half a minute to find that a node has. Raises StoreFailed
        when a store could not be restarted.
        """
        lost: list[str] = []

        async def settled() -> None:
            while True:
                lost.extend(self._forget_lost_nodes())
                if all(await asyncio.gather(*(_answers(*item) for item in self._stores.items()))):
                    return
                await asyncio.sleep(LOOK_S)

        await within(settled(), self._deadline_s, "the weight stores to answer (trainer.deadlines.weights_s)")
        return lost

    def check_any_left(self) -> None:
        """Raise StoreLost when every node that had a store has left the cluster."""
        if not self._stores:
            raise StoreLost(
                "no weight store is left: every node that had one has left the cluster, and the weights that the "
                "rollouts run went with them"
            )

    def _forget_lost_nodes(self) -> list[str]:
        alive = _alive()
        lost = [node for node in self._stores if node not in alive]
        for node in lost:
            del self._stores[node]
        return lost

    async def close(self) -> None:
        """Give back the memory that the stores hold."""
        closing = asyncio.gather(*(store.close.remote() for store in self._stores.values()))
        with contextlib.suppress(*GONE):  # its node is gone, and the memory with it
            await within(closing, self._deadline_s, "the weight stores to close (trainer.deadlines.weights_s)")


def _alive() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


async def _answers(node: str, store: Any) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S):
            await store.__ray_ready__.remote()
    except (ray.exceptions.RayError, TimeoutError) as error:
        if failed_to_start(error):
            raise StoreFailed(f"the weight store of node {node} does not start: {cause_of(error)}") from error
        return False  # dead, being restarted, or with nowhere to be restarted
    return True
