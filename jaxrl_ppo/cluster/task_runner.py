"""The controller of a run: prepares everything in a verl reader's order, then runs the pipeline. One Ray actor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from jaxrl_ppo.cluster.roles import create_resource_pool_manager, create_role_worker_mapping
from jaxrl_ppo.cluster.rollout_group import start_replicas
from jaxrl_ppo.cluster.trainer_group import TrainerGroup
from jaxrl_ppo.pipeline import one_step_off, sync
from jaxrl_ppo.pipeline.checkpoints import Checkpoints
from jaxrl_ppo.pipeline.step import Run
from jaxrl_ppo.schema.config import Config


class TaskRunner:
    """Synchronous PPO. `run` does the work; `events` is what the driver's console shows of it."""

    fit = staticmethod(sync.fit)

    def __init__(self, folder: str):
        """`folder` is the driver's working directory: relative paths of the configuration are relative to it."""
        self._folder = folder
        self._events: asyncio.Queue[tuple[Any, ...] | None] = asyncio.Queue()

    async def events(self) -> AsyncIterator[Any]:
        """First where the run starts, or None when it could not; then what to show, as (Console method, *arguments)."""
        while (event := await self._events.get()) is not None:
            yield event

    async def run(self, config: Config, config_yaml: str) -> None:
        """The whole run. Raises what ended it, if that is an error."""
        try:
            enter(self._folder)
            await self._run(config, config_yaml)
        finally:
            self._events.put_nowait(None)

    async def _run(self, config: Config, config_yaml: str) -> None:
        from jaxrl_ppo.data import copy_to_local, create_rl_dataset, create_rl_sampler, hf_tokenizer

        ...
