"""The rollout pool: one actor per replica, and the router over them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import ray

import device
from jaxrl_ppo.cluster.deaths import GONE, failed_to_start
from jaxrl_ppo.cluster.pools import ResourcePoolManager, Role
from jaxrl_ppo.cluster.rollout_worker import Replica
from jaxrl_ppo.cluster.stores import WeightStores
from jaxrl_ppo.rollout.deadline import within
from jaxrl_ppo.rollout.engine import RolloutEngine
from jaxrl_ppo.rollout.router import Limits, OnFault, Router, describe

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import Config
    from jaxrl_ppo.weights.manifest import WeightManifest

START_ATTEMPTS, BACKOFF_S = 3, 1.0

Verify = Callable[[int, RolloutEngine, "WeightManifest"], Awaitable[None]]


class RolloutGroup:
    """Starts, replaces and ends the replicas of the rollout pool."""

    def __init__(
        self,
        config: Config,
        worker_class: Any,
        pools: ResourcePoolManager,
        *,
        model_folder: str,
        stores: WeightStores,
        on_fault: OnFault,
    ):
        self.config, self.worker_class, self.pools, self.model_folder = config, worker_class, pools, model_folder
        self.stores, self.on_fault = stores, on_fault
        self._actors: dict[int, Any] = {}
        self._shared: list[list[str]] = []

    async def start(self, verify: Verify, shared: list[list[str]] | None = None) -> Router:
        """Start every replica; returns the router over them, which has `verify` check each weight load.

        `shared` are the devices of each trainer process, where the replicas take turns with it.
        """
        self._shared = shared or []
        replicas = await asyncio.gather(
            *(self._first_start(i) for i in range(self.pools.pool_of(Role.Rollout).processes))
        )
        deadlines = self.config.trainer.deadlines
        limits = Limits(completion_s=deadlines.generation_s, load_s=deadlines.weights_s, replace_s=deadlines.start_s)
        return Router(replicas, replace=self._start, verify=verify, limits=limits, on_fault=self.on_fault)

    async def _first_start(self, index: int) -> Replica:
        """A process that dies on its way up is started again, as the router does later; an error in it ends the run."""
        for attempt in range(1, START_ATTEMPTS):
            try:
                return await self._start(index)
            except GONE as error:
                if isinstance(error, ray.exceptions.RayTaskError) or failed_to_start(error):
                    raise
                self.on_fault("replica_failed", f"replica {index} died while it started: {describe(error)}")
                await asyncio.sleep(BACKOFF_S * 2**attempt)
        return await self._start(index)

    async def _start(self, index: int) -> Replica:
        """A new replica number `index`; what is left of an older one is killed first."""
        if index in self._actors:
            ray.kill(self._actors[index])
        environment = self._environment(index)
        actor = self._actors[index] = self.worker_class.options(
            **self.pools.options(Role.Rollout, index), runtime_env={"env_vars": environment}
        ).remote(os.getcwd(), self.config, index)
        node = await within(
            actor.start.remote(self.model_folder),
            self.config.trainer.deadlines.start_s,
            f"rollout replica {index} to start (trainer.deadlines.start_s)",
        )
        await self.stores.add(node)
        return Replica(actor)

    def _environment(self, index: int) -> dict[str, str]:
        """The variables of replica number `index`'s process."""
        rollout, pool = self.config.actor_rollout_ref.rollout, self.pools.pool_of(Role.Rollout)
        kind, variables = rollout.device or self.config.trainer.device, {}
        if rollout.name == "jax":
            shared = self.pools.shares(pool)
            variables = device.jax_environment(kind, local_devices=pool.devices, shared=shared)
        if self._shared:
            host, some = self.pools.host_of(Role.Rollout, index)
            visible = device.visible_environment(kind, self._shared[host][some])
            # Ray would hide the devices from a process that claims none.
            variables |= visible | {f"RAY_EXPERIMENTAL_NOSET_{name}": "1" for name in visible}
        return variables
