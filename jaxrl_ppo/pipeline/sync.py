"""Synchronous PPO: each batch is generated with the weights that it then trains."""

from __future__ import annotations

from jaxrl_ppo.pipeline.step import Run


async def fit(run: Run) -> None:
    """Run every remaining step; verl's `main_ppo`."""
    await run.sync_weights()
    await run.check_contract()
    await run.validate_before()
    for step in run.remaining_steps():
        batch = await run.start_generating(step)
        await run.sleep_rollouts()  # where they take turns with the trainer on its devices
        await run.train(step, batch)
        await run.sync_weights()
        if run.validates_at(step):
            await run.validate(step)
        if run.saves_at(step):
            await run.saving.save(step)
        run.finish(step)
