"""Writes a run's checkpoints beside its steps: the models at once, the commit when what was pending has landed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxrl_ppo.pipeline.checkpoints import CRITIC, Checkpoints
from jaxrl_ppo.pipeline.generation import Generated

if TYPE_CHECKING:
    from jaxrl_ppo.pipeline.step import Run


class Saving:
    """The checkpoints of one run. `step` is the last one that a checkpoint was begun of, -1 before the first."""

    def __init__(self, run: Run, checkpoints: Checkpoints, identity: Mapping[str, Any]):
        """`identity`, what the run is made of, goes into each checkpoint."""
        self.run, self.checkpoints, self.identity = run, checkpoints, identity
        self.step = -1
        self._committing: asyncio.Task[None] | None = None

    async def save(self, step: int, pending: asyncio.Future[Any] | None = None) -> None:
        """Start a checkpoint of everything up to `step`; it commits once the state and what is pending have landed.

        The prompt stream is saved as of now: the first prompt that is in neither a trained batch nor what is pending.
        """
        run = self.run
        controller = {
            "step": step,
            "mode": run.config.trainer.mode,
            "identity": self.identity,
            "pending": None,
        } | run.state()
        await self.finish()
        self.step = step
        with self._writing(step):
            folder = self.checkpoints.begin(step)
        with run.phase("save_checkpoint", step, "checkpoint"), self._writing(step):
            await run.trainer.save(folder / "actor")
            if "hf_model" in run.config.actor_rollout_ref.actor.checkpoint.save_contents:
                await run.trainer.save_pretrained(folder / "huggingface")
            if run.critic is not None:
                await run.critic.save(folder / CRITIC)
                if "hf_model" in run.config.critic.checkpoint.save_contents:
                    await run.critic.save_pretrained(folder / f"huggingface_{CRITIC}")
        if step == run.total_steps:
            pending = None
        self._committing = asyncio.create_task(self._commit(step, controller, pending), name=f"checkpoint {step}")

    def check(self) -> None:
        """Raise CheckpointError if the last checkpoint has failed: that ends the run now, not at the next one."""
        if self._committing is not None and self._committing.done():
            self._committing.result()

    async def finish(self) -> None:
        """Wait until the last checkpoint is committed. Raises CheckpointError if it cannot be."""
        if self._committing is not None:
            committing, self._committing = self._committing, None
            await committing

    async def _commit(self, step: int, controller: dict[str, Any], pending: asyncio.Future[Any] | None) -> None:
        run = self.run
        with run.observer.span("commit", track="checkpoint", step=step):
            if pending is not None:
                controller["pending"] = await pending
                if isinstance(generated := controller["pending"], Generated) and generated.frontier is not None:
                    controller["prompts"] = generated.frontier  # of a batch that draws as it goes
            with self._writing(step):
                await run.trainer.wait_until_saved()
                if run.critic is not None:
                    await run.critic.wait_until_saved()
            await asyncio.to_thread(self.checkpoints.commit, step, controller)

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """What goes wrong with the trainer's files names the checkpoint, and what is left of the others."""
        try:
            yield
        except OSError as error:
            raise self.checkpoints.failed(step, error) from error
