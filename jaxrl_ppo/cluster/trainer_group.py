"""The trainer pool as one object: every call goes to all of its processes, in one order, with a deadline."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

import device
from jaxrl_ppo.cluster.pools import ResourcePoolManager, Role
from jaxrl_ppo.rollout.deadline import within

if TYPE_CHECKING:
    import numpy as np

    from jaxrl_ppo.rollout.probe import WeightProbe
    from jaxrl_ppo.schema.config import Config
    from jaxrl_ppo.schema.records import Batch
    from jaxrl_ppo.weights.manifest import WeightManifest


class TrainerDied(RuntimeError):
    """A trainer process is gone; the run cannot go on, but can be resumed."""


class TrainerGroup:
    """The pipeline's Trainer on a pool of TrainerWorker actors."""

    def __init__(self, config: Config, workers: list[Any], probe: WeightProbe):
        self.config, self.workers = config, workers
        self.stores: list[Any] = []  # of the rollout nodes, once those are known
        self.probe = probe
        self.deadlines = config.trainer.deadlines

    @classmethod
    async def start(
        cls,
        config: Config,
        worker_class: Any,
        pools: ResourcePoolManager,
        *,
        model_folder: str,
        total_steps: int,
        needs_reference: bool,
        probe: WeightProbe,
    ) -> TrainerGroup:
        """Start the pool's processes as one JAX program with the model in it. `total_steps` are optimizer steps."""
        pool = pools.pool_of(Role.Actor)
        environment = device.jax_environment(config.trainer.device, local_devices=pool.devices)
        workers = [
            worker_class.options(**pools.options(Role.Actor, rank), runtime_env={"env_vars": environment}).remote(
                os.getcwd(), config, rank, pool.processes
            )
            for rank in range(pool.processes)
        ]
        group = cls(config, workers, probe)
        coordinator = await within(
            workers[0].address.remote(),
            group.deadlines.start_s,
            "trainer process 0 to start (trainer.deadlines.start_s)",
        )
        await group._all("start", "start_s", coordinator, model_folder, total_steps, needs_reference)
        return group

    async def _all(self, method: str, deadline: str, *args: Any) -> list[Any]:
        calls = asyncio.gather(*(getattr(worker, method).remote(*args) for worker in self.workers))
        try:
            return await within(
                calls,
                getattr(self.deadlines, deadline),
                f"{method} on the {len(self.workers)} trainer process(es) (trainer.deadlines.{deadline})",
            )
        except ray.exceptions.RayActorError as error:
            raise TrainerDied(
                f"a trainer process died during {method}; start the same command again to go on after the last "
                f"committed checkpoint. Cause: {error}"
            ) from error

    async def log_probs(self, batch: Batch) -> np.ndarray:
        return (await self._all("log_probs", "update_s", ray.put(batch)))[0]

    async def ref_log_probs(self, batch: Batch) -> np.ndarray:
        return (await self._all("ref_log_probs", "update_s", ray.put(batch)))[0]

    async def update_actor(self, batch: Batch) -> dict[str, float]:
        return (await self._all("update_actor", "update_s", ray.put(batch)))[0]

    async def stage_weights(self) -> WeightManifest:
        megabytes = self.config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
        version = (await self._all("stage_weights", "weights_s", self.stores, megabytes << 20))[0]
        # Taken now, so that a replica can be checked at any time, the trainer busy with the next version or not.
        self.probe.expect(version, (await self._all("score_tokens", "weights_s", self.probe.token_ids))[0])
        commits = asyncio.gather(*(store.commit.remote(version) for store in self.stores))
        manifests = await within(
            commits, self.deadlines.weights_s, "the weight stores to commit (trainer.deadlines.weights_s)"
        )
        return manifests[0]  # the same on every node, path included

    async def close_stores(self) -> None:
        """Give back the memory that the rollout nodes' stores hold."""
        closing = asyncio.gather(*(store.close.remote() for store in self.stores))
        await within(closing, self.deadlines.weights_s, "the weight stores to close (trainer.deadlines.weights_s)")

    async def save(self, folder: Path) -> None:
        await self._all("save", "checkpoint_s", str(folder))

    async def wait_until_saved(self) -> None:
        await self._all("wait_until_saved", "checkpoint_s")

    async def restore(self, folder: Path) -> None:
        await self._all("restore", "checkpoint_s", str(folder))

    async def save_pretrained(self, folder: Path) -> None:
        await self._all("save_pretrained", "checkpoint_s", str(folder))
