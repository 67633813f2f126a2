"""The rollout pool's process: one engine replica, and the weight store of a rollout node, behind Ray actors."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray

from jaxrl_ppo.cluster.process import enter
from jaxrl_ppo.schema import sizes

if TYPE_CHECKING:
    import numpy as np

    from jaxrl_ppo.rollout.engine import Completion, Request, RolloutEngine
    from jaxrl_ppo.schema.config import Config
    from jaxrl_ppo.weights.manifest import TensorRecord, WeightManifest

STORE_WAIT_S = 30


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
                model_folder,
                rollout,
                index=self.index,
                sleeps=sizes.takes_turns(self.config) and rollout.free_cache_engine,
                start_deadline_s=self.config.trainer.deadlines.start_s,
                deadline_s=self.config.trainer.deadlines.weights_s,
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

    async def sleep(self) -> None:
        """Give weights and caches up until the next load."""
        await self.engine.sleep()

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
        stream = self.actor.generate.options(num_returns="streaming").remote(list(requests))
        left = True
        try:
            async for reference in stream:
                yield await reference
            left = False
        finally:
            if left:  # nobody wants the rest: without this the engine would generate it all the same
                ray.cancel(stream)

    async def load_weights(self, manifest: WeightManifest) -> None:
        await self.actor.load_weights.remote(manifest)

    async def sleep(self) -> None:
        await self.actor.sleep.remote()

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        return await self.actor.score.remote(list(token_ids))

    async def check_health(self) -> None:
        await self.actor.check_health.remote()

    async def close(self) -> None:
        await self.actor.close.remote()


@ray.remote(num_cpus=0, max_restarts=-1)
class StoreWorker:
    """The weight store of the node that it is placed on."""

    def __init__(self, root: str):
        from jaxrl_ppo.weights.manifest import WeightError
        from jaxrl_ppo.weights.store import WeightStore

        self.restarted = ray.get_runtime_context().was_current_actor_reconstructed
        for _ in range(STORE_WAIT_S):  # a run that was just killed may not have let go of its store yet
            with contextlib.suppress(WeightError):
                self.store = WeightStore(root)
                return
            time.sleep(1)
        self.store = WeightStore(root)

    def begin(self, version: int) -> str:
        """Start receiving `version`; the folder that its files go into."""
        return self.store.begin(version)

    def put(self, version: int, bucket: dict[str, np.ndarray]) -> None:
        """Take one bucket of tensors."""
        self.store.put(version, bucket)

    def add(self, version: int, records: dict[str, TensorRecord]) -> None:
        """Take up a bucket that a process of this node has written into the folder itself."""
        self.store.add(version, records)

    def commit(self, version: int, number: int) -> tuple[WeightManifest, bool]:
        """Make `version` the newest; also tells whether this is the first commit since this process was restarted."""
        manifest, restarted = self.store.commit(version, number), self.restarted
        self.restarted = False
        return manifest, restarted

    def copy(self, source: Any, manifest: WeightManifest) -> None:
        """Take over `manifest`'s version from the store `source` of another node, under the same path."""
        from jaxrl_ppo.weights.store import commit_number

        self.store.begin(manifest.version)
        for bucket in source.buckets.options(num_returns="streaming").remote(manifest):
            self.store.put(manifest.version, ray.get(bucket))
        self.store.commit(manifest.version, commit_number(manifest.folder))

    def buckets(self, manifest: WeightManifest) -> Iterator[dict[str, np.ndarray]]:
        """The tensors of a committed version, file by file."""
        from jaxrl_ppo.weights.reader import read_tensors

        for file in sorted({record.file for record in manifest.tensors.values()}):
            tensors = {name: record for name, record in manifest.tensors.items() if record.file == file}
            yield dict(read_tensors(dataclasses.replace(manifest, tensors=tensors)))

    def close(self) -> None:
        """Give the memory back."""
        self.store.close()
