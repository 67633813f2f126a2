"""One-step-off-policy PPO: batch t+1 is generated while update t runs, so it is exactly one update old."""

from __future__ import annotations

from jaxrl_ppo.pipeline.step import Run


async def fit(run: Run) -> None:
    """Run every remaining step; verl's `one_step_off_policy/main_ppo`."""
    await run.sync_weights()
    await run.check_contract()
    await run.validate_before()
    pending = run.restored_batch() or run.start_generating(run.step + 1)
    for step in run.remaining_steps():
        batch = await pending
        if step < run.total_steps:
            pending = run.start_generating(step + 1)  # with the weights of update step - 1; overlaps everything below
        await run.train(step, batch)
        if run.validates_at(step):
            await pending
            await run.sync_weights()  # the weights just trained
            await run.validate(step)
        if run.saves_at(step):
            await run.saving.save(step, pending)
        run.finish(step)
