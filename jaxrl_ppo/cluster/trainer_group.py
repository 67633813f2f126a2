"""The policy on the trainer pool, and the critic on its pool, as the pipeline knows them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import ray

from jaxrl_ppo.cluster.stores import StoreLost, WeightStores

if TYPE_CHECKING:
    import numpy as np

    from jaxrl_ppo.cluster.workers import Workers
    from jaxrl_ppo.rollout.probe import WeightProbe
    from jaxrl_ppo.rollout.router import OnFault
    from jaxrl_ppo.schema.config import Config
    from jaxrl_ppo.schema.records import Batch
    from jaxrl_ppo.weights.manifest import WeightManifest

ACTOR, CRITIC = "actor", "critic"
STAGE_ATTEMPTS = 4  # of a weight version, as stores die on the way


class ModelGroup:
    """A model that is trained on `workers`; `role` says which of theirs."""

    def __init__(self, workers: Workers, role: str):
        self.workers, self.role = workers, role

    async def save(self, folder: Path) -> None:
        await self.workers.all("save", "checkpoint_s", self.role, str(folder))

    async def wait_until_saved(self) -> None:
        await self.workers.all("wait_until_saved", "checkpoint_s", self.role)

    async def restore(self, folder: Path) -> None:
        await self.workers.all("restore", "checkpoint_s", self.role, str(folder))

    async def save_pretrained(self, folder: Path) -> None:
        await self.workers.all("save_pretrained", "checkpoint_s", self.role, str(folder))


class CriticGroup(ModelGroup):
    """The pipeline's Critic."""

    def __init__(self, workers: Workers):
        super().__init__(workers, CRITIC)

    async def load(self, model_folder: str, total_steps: int) -> None:
        """Load the model; `total_steps` are the critic's optimizer steps."""
        await self.workers.all("load_critic", "start_s", model_folder, total_steps)

    async def values(self, batch: Batch) -> np.ndarray:
        return (await self.workers.all("values", "update_s", ray.put(batch)))[0]

    async def update(self, batch: Batch) -> dict[str, float]:
        return (await self.workers.all("update_critic", "update_s", ray.put(batch)))[0]


class TrainerGroup(ModelGroup):
    """The pipeline's Trainer."""

    def __init__(self, config: Config, workers: Workers, probe: WeightProbe, stores: WeightStores, on_fault: OnFault):
        super().__init__(workers, ACTOR)
        self.config = config
        self.stores = stores
        self.probe = probe
        self.on_fault = on_fault
        self.deadlines = config.trainer.deadlines

    async def load(self, model_folder: str, total_steps: int, *, needs_reference: bool) -> None:
        """Load the policy, and the reference policy if needed; `total_steps` are the actor's optimizer steps."""
        await self.workers.all("load_actor", "start_s", model_folder, total_steps, needs_reference)

    async def log_probs(self, batch: Batch, temperature: float | None = None) -> np.ndarray:
        return (await self.workers.all("log_probs", "update_s", ray.put(batch), temperature))[0]

    async def ref_log_probs(self, batch: Batch) -> np.ndarray:
        return (await self.workers.all("ref_log_probs", "update_s", ray.put(batch)))[0]

    async def sum_pi_squared(self, batch: Batch, log_probs: np.ndarray | None) -> np.ndarray:
        return (await self.workers.all("sum_pi_squared", "update_s", ray.put(batch), log_probs))[0]

    async def update_actor(self, batch: Batch) -> dict[str, float]:
        return (await self.workers.all("update_actor", "update_s", ray.put(batch)))[0]

    async def stage_weights(self) -> WeightManifest:
        for attempt in range(1, STAGE_ATTEMPTS + 1):
            try:
                manifest, restarted = await self._stage_weights()
            except StoreLost:
                if attempt == STAGE_ATTEMPTS:
                    raise
                lost = await self.stores.settle()
                where = f"with its node {', '.join(lost)}" if lost else "and is restarted"
                self.on_fault("store_lost", f"a weight store died, {where}: the weights are staged again")
                continue
            if restarted and attempt == 1:
                self.on_fault("store_lost", "a weight store died with nothing on its way to it, and was restarted")
            break
        return manifest

    async def _stage_weights(self) -> tuple[WeightManifest, bool]:
        megabytes = self.config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
        self.stores.check_any_left()
        stores = self.stores.by_node
        version = (await self.workers.all("stage_weights", "weights_s", stores, megabytes << 20))[0]
        # Taken now, so that a replica can be checked at any time, the trainer busy with the next version or not.
        self.probe.expect(version, (await self.workers.all("score_tokens", "weights_s", self.probe.token_ids))[0])
        return await self.stores.commit(version, stores)
