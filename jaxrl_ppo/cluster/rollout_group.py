"""Starting the rollout pool: one actor per replica, a weight store on each of their nodes, the router over them."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import device
from jaxrl_ppo.cluster.deadlines import within
from jaxrl_ppo.cluster.pools import ResourcePoolManager, Role
from jaxrl_ppo.cluster.rollout_worker import Replica, StoreWorker
from jaxrl_ppo.rollout.router import Router

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import Config


def store_root(run_folder: str) -> str:
    """Where a rollout node keeps weights: shared memory, in a folder that belongs to the run folder alone.

    A run that is started again finds, and clears, what a crashed one left behind.
    """
    digest = hashlib.sha256(str(Path(run_folder).absolute()).encode()).hexdigest()[:16]
    return f"/dev/shm/jaxrl_ppo-{os.getuid()}-{digest}"


async def start_replicas(
    config: Config, worker_class: Any, pools: ResourcePoolManager, *, model_folder: str
) -> tuple[Router, list[Any]]:
    """Start every replica; returns the router over them, and the stores of their nodes for the trainer to send to."""
    pool = pools.pool_of(Role.Rollout)
    rollout = config.actor_rollout_ref.rollout
    kind = rollout.device or config.trainer.device
    environment = device.jax_environment(kind, local_devices=pool.devices) if rollout.name == "jax" else {}
    deadline, key = config.trainer.deadlines.start_s, "trainer.deadlines.start_s"

    async def start(index: int) -> tuple[Replica, str]:
        actor = worker_class.options(**pools.options(Role.Rollout, index), runtime_env={"env_vars": environment}).remote(
            config, index
        )
        node = await within(actor.start.remote(model_folder), deadline, f"rollout replica {index} to start", key)
        return Replica(actor), node

    started = await asyncio.gather(*(start(index) for index in range(pool.processes)))
    root = store_root(config.trainer.default_local_dir)
    stores = [
        StoreWorker.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(root)
        for node in sorted({node for _, node in started})
    ]

    async def replace(index: int) -> Replica:
        return (await start(index))[0]

    return Router([replica for replica, _ in started], replace=replace), stores
