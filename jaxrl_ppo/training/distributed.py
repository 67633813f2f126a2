"""Several trainer processes as one JAX program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import TrainerConfig


class DistributedError(RuntimeError):
    """The trainer's processes did not become one program."""


def initialize(config: TrainerConfig, coordinator: str, processes: int, rank: int) -> None:
    """Join the JAX program of `processes` processes as number `rank`; process 0 serves at `coordinator`, "host:port".

    Must come before anything touches JAX's devices; platform, virtual devices and collectives are in the process's
    environment already (`device.jax_environment`). One process alone needs no coordinator. Raises DistributedError
    when the processes have not all joined within trainer.deadlines.start_s.
    """
    if processes == 1:
        return
    deadline = int(config.deadlines.start_s)
    try:
        jax.distributed.initialize(coordinator, processes, rank, initialization_timeout=deadline)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"trainer process {rank} of {processes} could not join the others at {coordinator} within {deadline} s "
            f"(trainer.deadlines.start_s): {error}"
        ) from error
