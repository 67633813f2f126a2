"""Several trainer processes as one JAX program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import TrainerConfig


class DistributedError(RuntimeError):
    """The trainer's processes did not become one program."""


def initialize(config: TrainerConfig, coordinator: str, processes: int, rank: int) -> None:
    """Join the JAX program of `processes` processes at `coordinator` ("host:port" of process 0) as number `rank`.

    Must run before anything else touches JAX's devices. On CPU the process gets `trainer.devices_per_process` virtual
    devices (default: its share of the node's `n_gpus_per_node`), and processes talk over gloo. Raises DistributedError
    when JAX is already running, or when the processes do not find one another.
    """
    if jax.extend.backend.backends_are_initialized() if hasattr(jax, "extend") else False:
        raise DistributedError("JAX is already running in this process; initialize() must come first")
    if config.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", local_devices(config, processes))
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
