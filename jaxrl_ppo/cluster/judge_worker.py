"""The process that runs one server of a generative judge, on the devices of the reward model's pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from jaxrl_ppo.cluster.process import enter

if TYPE_CHECKING:
    from jaxrl_ppo.rollout.vllm_server import VllmServer
    from jaxrl_ppo.schema.config import Config


@ray.remote
class JudgeWorker:
    """One server; its methods, and `start` before them."""

    def __init__(self, folder: str, config: Config):
        enter(folder)
        self.config = config
        self.server: VllmServer

    async def start(self, model_folder: str) -> str:
        """Start the server; returns its address, host:port."""
        from jaxrl_ppo.rollout.vllm_server import VllmServer

        self.server = await VllmServer.start(
            model_folder,
            self.config.reward.reward_model,
            host=ray.util.get_node_ip_address(),
            deadline_s=self.config.trainer.deadlines.start_s,
        )
        return self.server.address

    async def ended(self) -> str:
        """Wait for the server's end; how it ended, in words."""
        return await self.server.ended()

    async def answers(self) -> bool:
        """Whether the server says that it can serve."""
        return await self.server.answers()

    async def close(self) -> None:
        """End the server."""
        await self.server.close()
