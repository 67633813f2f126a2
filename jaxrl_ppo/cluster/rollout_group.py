"""The rollout pool: one actor per replica, a weight store on each of their nodes, and the router over them."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import device
from jaxrl_ppo.cluster.pools import ResourcePoolManager, Role
from jaxrl_ppo.cluster.rollout_worker import Replica, StoreWorker
from jaxrl_ppo.rollout.deadline import within
from jaxrl_ppo.rollout.engine import RolloutEngine
from jaxrl_ppo.rollout.router import Limits, Router

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import Config
    from jaxrl_ppo.weights.manifest import WeightManifest

Verify = Callable[[int, RolloutEngine, "WeightManifest"], Awaitable[None]]


def store_root(run_folder: str) -> str:
    """Where a rollout node keeps weights: shared memory, in a folder that belongs to the run folder alone.

    A run that is started again finds, and clears, what a crashed one left behind.
    """
    digest = hashlib.sha256(str(Path(run_folder).absolute()).encode()).hexdigest()[:16]
    return f"/dev/shm/jaxrl_ppo-{os.getuid()}-{digest}"


class RolloutGroup:
    """Starts, replaces and ends the replicas of the rollout pool."""

    def __init__(self, config: Config, worker_class: Any, pools: ResourcePoolManager, model_folder: str):
        self.config, self.worker_class, self.pools, self.model_folder = config, worker_class, pools, model_folder
        self._actors: dict[int, Any] = {}
        self.nodes: set[str] = set()

    async def start(self, verify: Verify) -> Router:
        """Start every replica; returns the router over them, which has `verify` check each weight load."""
        replicas = await asyncio.gather(*(self._start(i) for i in range(self.pools.pool_of(Role.Rollout).processes)))
        deadlines = self.config.trainer.deadlines
        limits = Limits(completion_s=deadlines.generation_s, load_s=deadlines.weights_s, replace_s=deadlines.start_s)
        return Router(replicas, replace=self._start, verify=verify, limits=limits)

    async def _start(self, index: int) -> Replica:
        """A new replica number `index`; what is left of an older one is killed first."""
        if index in self._actors:
            ray.kill(self._actors[index])
        rollout, pool = self.config.actor_rollout_ref.rollout, self.pools.pool_of(Role.Rollout)
        kind = rollout.device or self.config.trainer.device
        environment = device.jax_environment(kind, local_devices=pool.devices) if rollout.name == "jax" else {}
        actor = self._actors[index] = self.worker_class.options(
            **self.pools.options(Role.Rollout, index), runtime_env={"env_vars": environment}
        ).remote(os.getcwd(), self.config, index)
        self.nodes.add(
            await within(
                actor.start.remote(self.model_folder),
                self.config.trainer.deadlines.start_s,
                f"rollout replica {index} to start (trainer.deadlines.start_s)",
            )
        )
        return Replica(actor)

    def start_stores(self) -> list[Any]:
        """A weight store on every node that has a replica."""
        root = store_root(self.config.trainer.default_local_dir)
        store_class: Any = StoreWorker  # a Ray actor class, which no type checker sees
        return [
            store_class.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(root)
            for node in sorted(self.nodes)
        ]
