"""The judge's servers as a group, on real Ray processes: which is asked, and what becomes of a call when one dies.

The servers are processes that serve nothing: what vLLM's do is tested in tests/e2e/test_judge_runs.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import ray

from jaxrl_ppo.cluster import judge_group
from jaxrl_ppo.cluster.judge_group import JudgeGroup
from jaxrl_ppo.cluster.judge_worker import JudgeWorker
from jaxrl_ppo.cluster.pools import Role
from jaxrl_ppo.cluster.roles import create_resource_pool_manager, create_role_worker_mapping
from jaxrl_ppo.rewards.results import Result, RewardError, failed
from jaxrl_ppo.schema.config import Config


@ray.remote
class Server:
    """Has a process's number for an address; files in the model's folder say what it suffers from."""

    def __init__(self, folder, config):
        pass

    async def start(self, model_folder):
        self.folder = Path(model_folder)
        if (self.folder / "no room").exists():
            raise RuntimeError("there is no room")
        return str(os.getpid())

    async def ended(self):
        await asyncio.Event().wait()

    async def answers(self):
        return not (self.folder / f"{os.getpid()} hangs").exists()

    async def close(self):
        (self.folder / f"{os.getpid()} closed").touch()


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def configuration() -> Config:
    config = Config()
    config.trainer.device = config.actor_rollout_ref.rollout.device = "cpu"
    config.trainer.n_gpus_per_node = config.actor_rollout_ref.rollout.n_gpus_per_node = 1
    config.reward.custom_reward_function.path = "asks.py"
    model = config.reward.reward_model
    model.enable = model.enable_resource_pool = True
    model.rollout.name, model.rollout.tensor_model_parallel_size = "vllm", 2
    model.nnodes, model.n_gpus_per_node = 1, 4
    return config


async def test_calls_go_to_the_least_asked_and_a_lost_server_costs_a_repetition(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(judge_group, "START_ATTEMPTS", 1)
    config = configuration()
    mapping = create_role_worker_mapping(config)
    assert mapping[Role.RewardModel] is JudgeWorker
    pools = create_resource_pool_manager(config, mapping)
    pools.create(60)
    faults: list[tuple[str, str]] = []
    group = JudgeGroup(
        config, pools, Server, model_folder=str(tmp_path), on_fault=lambda name, message: faults.append((name, message))
    )
    asked: list[str] = []

    async def call(address: str, *, answer: Result, enough: asyncio.Event | None = None) -> Result:
        asked.append(address)
        if enough is not None:
            await enough.wait()
        return answer

    try:
        await group.start()
        servers = {server.address for server in group._servers}
        enough = asyncio.Event()
        calls = [
            asyncio.create_task(group.ask(lambda a, i=i: call(a, answer=Result(i), enough=enough))) for i in range(4)
        ]
        while len(asked) < 4:
            await asyncio.sleep(0.01)
        assert sorted(asked) == sorted([*servers, *servers])
        enough.set()
        assert [(await one).reward for one in calls] == [0, 1, 2, 3]

        asked.clear()
        bad = failed("exception", "the function's own fault")
        assert await group.ask(lambda a: call(a, answer=bad)) == bad
        assert len(asked) == 1
        assert not faults

        async def kill_or_hang(address: str, how: str) -> Result:
            asked.append(address)
            if len(asked) > 1:
                return Result(1.0)
            if how == "dies":
                os.kill(int(address), signal.SIGKILL)
            else:
                (tmp_path / f"{address} hangs").touch()
            return failed("exception", "connection reset")

        for how in ("dies", "hangs"):
            asked.clear()
            assert (await group.ask(lambda a, how=how: kill_or_hang(a, how))).reward == 1
            assert len(set(asked)) == 2
            while None in [server.address for server in group._servers]:
                await asyncio.sleep(0.01)
            assert asked[0] not in {server.address for server in group._servers}
        assert [name for name, _ in faults] == ["reward_model_failed"] * 2

        (tmp_path / "no room").touch()
        for server in group._servers:
            os.kill(int(server.address), signal.SIGKILL)
            server.address = None
        with pytest.raises(RewardError, match=r"server \d cannot be started again: RuntimeError: there is no room"):
            await group.ask(lambda a: call(a, answer=Result(1.0)))
    finally:
        await group.close()
        pools.close()


async def test_a_group_that_ends_ends_its_servers(cluster, tmp_path):
    config = configuration()
    pools = create_resource_pool_manager(config, create_role_worker_mapping(config))
    pools.create(60)
    group = JudgeGroup(config, pools, Server, model_folder=str(tmp_path), on_fault=lambda name, message: None)
    try:
        await group.start()
        addresses = [server.address for server in group._servers]
    finally:
        await group.close()
        pools.close()
    assert all((tmp_path / f"{address} closed").exists() for address in addresses)
