"""Asynchronous PPO: rollouts generate all along, as far ahead of the trainer as the staleness limit lets them."""

from __future__ import annotations

from jaxrl_ppo.pipeline.queue import RolloutQueue
from jaxrl_ppo.pipeline.step import Run


async def fit(run: Run) -> None:
    """Run every remaining step; verl's `fully_async_policy/fully_async_main`."""
    await run.sync_weights()
    await run.check_contract()
    await run.validate_before()
    queue = RolloutQueue(run)
    for step in run.remaining_steps():
        batch = await queue.take(step)
        await run.train(step, batch)
        queue.offer_weights()  # loaded under running requests; overlaps everything below
        if run.validates_at(step):
            async with queue.held():
                await run.sync_weights()  # the weights just trained
                await run.validate(step)
        if run.saves_at(step):
            await run.saving.save(step, queue.outstanding())
        run.finish(step)
