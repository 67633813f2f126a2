"""The rollout pool's process: one engine replica, and the weight store of a rollout node, behind Ray actors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import ray

from jaxrl_ppo.cluster.process import enter

if TYPE_CHECKING:
    import numpy as np

    from jaxrl_ppo.rollout.engine import Completion, Request, RolloutEngine
    from jaxrl_ppo.schema.config import Config
    from jaxrl_ppo.weights.manifest import WeightManifest


@ray.remote
class RolloutWorker:
    """Replica `index`; its engine's methods, and `start` before them."""

    def __init__(self, folder: str, config: Config, index: int):
        cores = config.actor_rollout_ref.rollout.cpu_affinity
        enter(folder, cores[index] if cores else None, config.trainer.compilation_cache_dir)
        self.config, self.index = config, index
        self.engine: RolloutEngine

    async def start(self, model_folder: str) -> str:
        """Build the engine; returns the node that it runs on."""
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.name == "vllm":
            from jaxrl_ppo.rollout.vllm_engine import VllmEngine

            self.engine = await VllmEngine.create(
                model_folder, rollout, index=self.index, start_deadline_s=self.config.trainer.deadlines.start_s
            )
        else:
            from jaxrl_ppo.rollout.jax_engine import JaxEngine

            self.engine = await JaxEngine.create(model_folder, rollout)
        return ray.get_runtime_context().get_node_id()

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Yield completions as they finish."""
        async for completion in self.engine.generate(requests):
            yield completion

    async def load_weights(self, manifest: WeightManifest) -> None:
        """Run `manifest`'s weights from now on."""
        await self.engine.load_weights(manifest)

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-prob of each token after the first."""
        return await self.engine.score(token_ids)

    async def check_health(self) -> None:
        """Raise when the engine cannot serve."""
        await self.engine.check_health()

    async def close(self) -> None:
        """End the engine's processes."""
        await self.engine.close()


class Replica:
    """A RolloutWorker's handle as a RolloutEngine."""

    def __init__(self, actor: Any):
        self.actor = actor

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        async for reference in self.actor.generate.options(num_returns="streaming").remote(list(requests)):
            yield await reference

    async def load_weights(self, manifest: WeightManifest) -> None:
        await self.actor.load_weights.remote(manifest)

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        return await self.actor.score.remote(list(token_ids))

    async def check_health(self) -> None:
        await self.actor.check_health.remote()

    async def close(self) -> None:
        await self.actor.close.remote()


@ray.remote(num_cpus=0)
class StoreWorker:
    """The weight store of the node that it is placed on."""

    def __init__(self, root: str):
        from jaxrl_ppo.weights.store import WeightStore

        self.store = WeightStore(root)

    def begin(self, version: int) -> None:
        """Start receiving `version`."""
        self.store.begin(version)

    def put(self, version: int, bucket: dict[str, np.ndarray]) -> None:
        """Take one bucket of tensors."""
        self.store.put(version, bucket)

    def commit(self, version: int) -> WeightManifest:
        """Make `version` the newest."""
        return self.store.commit(version)

    def close(self) -> None:
        """Give the memory back."""
        self.store.close()
