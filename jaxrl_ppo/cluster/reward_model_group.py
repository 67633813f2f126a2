"""The reward model on its pool, as the reward manager knows it: started, asked, replaced once when it dies or hangs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray

from jaxrl_ppo.cluster.pools import ResourcePoolManager, Role
from jaxrl_ppo.cluster.workers import TrainerDied, Workers
from jaxrl_ppo.rewards.model import RewardModelLost
from jaxrl_ppo.rewards.results import RewardError
from jaxrl_ppo.rollout.errors import DeadlineExceeded

if TYPE_CHECKING:
    import numpy as np

    from jaxrl_ppo.rollout.router import OnFault
    from jaxrl_ppo.schema.config import Config

WORKER_FAULTS = (TrainerDied, DeadlineExceeded)


class RewardModelGroup:
    """Scores token sequences on the processes of the reward model's pool, or of the trainer's where it has none."""

    def __init__(
        self,
        config: Config,
        pools: ResourcePoolManager,
        worker_class: type,
        *,
        model_folder: str,
        trainers: Workers,
        on_fault: OnFault,
    ):
        """`trainers` serve where the reward model has no pool of its own."""
        self.config, self.pools, self.worker_class, self.model_folder = config, pools, worker_class, model_folder
        self.own_pool = pools.pool_of(Role.RewardModel) is not pools.pool_of(Role.Actor)
        self.on_fault = on_fault
        self._workers: Workers | None = None if self.own_pool else trainers

    async def start(self) -> None:
        """Start the processes, if they are its own, and load the model."""
        if self.own_pool:
            self._workers = await Workers.start(self.config, self.worker_class, self.pools, Role.RewardModel)
        assert self._workers is not None
        await self._workers.all("load_reward_model", "start_s", self.model_folder)

    async def score(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """The score of each sequence, float32 [N].

        A pool of its own that dies or lets trainer.deadlines.scoring_s pass is started again, and asked once more.
        Raises RewardModelLost when that fails too, and RewardError when it cannot be started; a death of the trainer's
        pool raises TrainerDied.
        """
        shared = ray.put(list(sequences))
        if not self.own_pool:
            assert self._workers is not None
            return (await self._workers.all("score_sequences", "update_s", shared))[0]
        for _ in range(2):
            if self._workers is None:
                await self._start_again()
            assert self._workers is not None
            try:
                return (await self._workers.all("score_sequences", "scoring_s", shared))[0]
            except WORKER_FAULTS as error:
                cause = str(error).partition(";")[0]  # what follows is advice for the trainer's death
                self.on_fault("reward_model_failed", f"the reward model is started again: {cause}")
                self._end()
        raise RewardModelLost(f"{cause}, twice")

    async def _start_again(self) -> None:
        try:
            await self.start()
        except WORKER_FAULTS as error:
            self._end()
            raise RewardError(f"the reward model cannot be started again: {error}") from error

    def _end(self) -> None:
        """Kill what is left of its processes."""
        for actor in self._workers.actors if self._workers else ():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)
        self._workers = None
