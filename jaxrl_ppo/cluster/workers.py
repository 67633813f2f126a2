"""The processes of a pool as one object: started as one JAX program, called all alike, with deadlines."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import ray

import device
from jaxrl_ppo.cluster.deaths import GONE, cause_of
from jaxrl_ppo.cluster.pools import ResourcePoolManager, Role
from jaxrl_ppo.cluster.stores import StoreLost
from jaxrl_ppo.rollout.deadline import within
from jaxrl_ppo.weights.manifest import NotBegunError

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import Config


class TrainerDied(RuntimeError):
    """A trainer process is gone; the run cannot go on, but can be resumed."""


class Workers:
    """TrainerWorker actors of one pool. Every call goes to all of them, in one order."""

    def __init__(self, config: Config, actors: list[Any], pool: str):
        self.actors, self.pool = actors, pool
        self.deadlines = config.trainer.deadlines

    @classmethod
    async def start(cls, config: Config, worker_class: Any, pools: ResourcePoolManager, role: Role) -> Workers:
        """Start the processes of the pool that serves `role` as one JAX program."""
        pool = pools.pool_of(role)
        shared = pools.shares(pool)
        environment = device.jax_environment(config.trainer.device, local_devices=pool.devices, shared=shared)
        actors = [
            worker_class.options(**pools.options(role, rank), runtime_env={"env_vars": environment}).remote(
                os.getcwd(), config, rank, pool.processes
            )
            for rank in range(pool.processes)
        ]
        workers = cls(config, actors, pool.name)
        coordinator = await within(
            actors[0].address.remote(),
            workers.deadlines.start_s,
            f"process 0 of the {pool.name} to start (trainer.deadlines.start_s)",
        )
        await workers.all("join", "start_s", coordinator)
        return workers

    async def all(self, method: str, deadline: str, *args: Any) -> list[Any]:
        """Call `method` on every process within the deadline trainer.deadlines.`deadline`; results by rank.

        Raises TrainerDied when a process is gone, StoreLost when a weight store is that it was sending to.
        """
        calls = asyncio.gather(*(getattr(actor, method).remote(*args) for actor in self.actors))
        try:
            return await within(
                calls,
                getattr(self.deadlines, deadline),
                f"{method} on the {len(self.actors)} process(es) of the {self.pool} (trainer.deadlines.{deadline})",
            )
        except ray.exceptions.RayTaskError as error:  # first: one that tells of an actor's death is of both kinds
            if isinstance(error.cause, (*GONE, NotBegunError)):
                raise StoreLost(f"a weight store died during {method}: {cause_of(error.cause)}") from error
            if isinstance(error.cause, OSError):  # the pipeline knows what a full disk means, and not what Ray is
                raise error.cause from error
            raise
        except GONE as error:
            raise TrainerDied(f"a process of the {self.pool} died during {method}: {cause_of(error)}") from error
