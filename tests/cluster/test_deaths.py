"""Deaths of processes as Ray tells them, and as the run tells them on."""

from __future__ import annotations

import asyncio

import pytest
import ray

from jaxrl_ppo.cluster.workers import TrainerDied, Workers
from jaxrl_ppo.rollout.router import describe
from jaxrl_ppo.schema.config import Config

# As Ray's memory monitor words it.
OUT_OF_MEMORY = (
    """3 worker(s) were killed due to the node running low on memory. Memory on the node was 23.1GB / 23.5GB
OOM kill reason: Memory usage exceeded threshold (95.0%)
Object store memory usage: [- objects spillable: 0
- bytes spillable: 0
"""
    + "Top memory users: python\n" * 50
)


class Method:
    """A remote method whose process is killed while it runs."""

    def __init__(self, error: Exception):
        self.error = error

    async def remote(self, *args: object) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.OutOfMemoryError(OUT_OF_MEMORY),
        ray.exceptions.ActorDiedError(),
        ray.exceptions.NodeDiedError("x"),
    ],
)
def test_a_trainer_process_that_is_gone_ends_the_run_with_its_cause_in_a_line(error: Exception) -> None:
    actor = type("Actor", (), {"update_actor": Method(error)})()
    workers = Workers(Config(), [actor], "trainer pool")
    with pytest.raises(TrainerDied, match="a process of the trainer pool died during update_actor: ") as died:
        asyncio.run(workers.all("update_actor", "update_s"))
    assert len(str(died.value).splitlines()) == 1
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        assert "killed for want of memory: 23.1GB of its node's 23.5GB were in use" in str(died.value)


def test_errors_of_replicas_are_told_in_a_line() -> None:
    text = describe(ray.exceptions.OutOfMemoryError(OUT_OF_MEMORY))
    assert text.startswith("OutOfMemoryError: killed for want of memory: 23.1GB of its node's 23.5GB were in use")
    assert len(text) < 450
    assert len(text.splitlines()) == 1
