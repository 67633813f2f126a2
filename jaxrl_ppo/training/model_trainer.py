"""One model on a mesh with its optimizer: what the policy's and the critic's trainers have in common."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxrl_ppo.models.huggingface import load_params
from jaxrl_ppo.models.kernels import check_kernel
from jaxrl_ppo.models.parameters import flatten, nest
from jaxrl_ppo.sharding.memory import in_host_memory, on_device
from jaxrl_ppo.training.checkpoint import EXTRA, MODEL, OPTIMIZER, StateError, StateStore, abstract
from jaxrl_ppo.training.packing import MicroStep, Packing

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import CheckpointConfig
    from jaxrl_ppo.training.model_programs import ModelPrograms


class ModelTrainer:
    """A model's parameters and optimizer state. Every process calls every method alike, with equal inputs.

    `version` counts the optimizer steps done, `updates` the batches that they belong to.
    """

    def __init__(
        self,
        programs: ModelPrograms,
        checkpoint: CheckpointConfig,
        *,
        folder: str | Path,
        dtype: Any,
        seed: int,
        offload: bool,
        adapter: str | None = None,
    ):
        """Load the model of `folder`, its parameters in `dtype`, and the LoRA adapter of the folder `adapter`.

        With `offload` they rest in host memory while they are not `in_use`.

        Raises ModelFolderError or ShardingError, and KernelError when the attention kernel is wrong on this machine.
        """
        self.model, self.mesh = programs.model, programs.layout.mesh
        if programs.attention != "xla":
            check_kernel(programs.attention, programs.model, programs.dtype)
        self.seed = seed
        self._programs, self._checkpoint = programs, checkpoint
        params = self._load(folder, dtype, adapter)
        self.state = programs.init_state(params)
        self.params = programs.to_hosts(params) if offload else params
        self._offload = offload
        self.version = 0
        self.updates = 0
        self._store = StateStore(asynchronous=checkpoint.async_save)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Meanwhile `params` lie on the devices, wherever they rest."""
        resting = self.params
        if not self._offload or on_device(jax.tree.leaves(resting)[0].sharding):
            yield
            return
        self.params = fetched = self._programs.to_devices(resting)
        try:
            yield
        finally:
            self.params = resting if self.params is fetched else self._programs.to_hosts(self.params)

    def save(self, folder: str | Path) -> None:
        """Start saving what checkpoint.save_contents names; returns once the next update cannot touch it.

        `extra` is what the next update's shuffle depends on. `hf_model` is written by `models.pretrained`.
        """
        parts = {
            MODEL: self.params,
            OPTIMIZER: self.state,
            EXTRA: {"version": self.version, "updates": self.updates, "seed": self.seed},
        }
        wanted = self._checkpoint.save_contents
        self._store.save(folder, {name: part for name, part in parts.items() if name in wanted})

    def wait_until_saved(self) -> None:
        """Return when the last save is on disk; raises what went wrong with it."""
        self._store.wait()

    def restore(self, folder: str | Path) -> None:
        """Take up the parts of a saved state that checkpoint.load_contents names, on this trainer's mesh.

        Raises StateError when the folder is incomplete or another model's, and when the model is not asked for: the
        run would go on with the weights that it began with.
        """
        wanted = self._checkpoint.load_contents
        if MODEL not in wanted:
            raise StateError(
                f"{folder} cannot be gone on from: checkpoint.load_contents={wanted} leaves its weights behind. Add "
                f"{MODEL} there and in checkpoint.save_contents, or start anew with trainer.resume_mode=disable"
            )
        placements = self._programs.parameter_shardings
        parts = {
            MODEL: abstract(self.params, in_host_memory(placements) if self._offload else placements),
            OPTIMIZER: abstract(self.state, self._programs.state_shardings),
            EXTRA: None,
        }
        found = self._store.restore(folder, {name: part for name, part in parts.items() if name in wanted})
        self.params = found.get(MODEL, self.params)
        self.state = found.get(OPTIMIZER, self.state)
        if EXTRA in found:
            self.version, self.updates = found[EXTRA]["version"], found[EXTRA]["updates"]

    def _accumulate(
        self, packing: Packing, columns: dict[str, np.ndarray], *scalars: np.float32
    ) -> tuple[Any, dict[str, jax.Array], list[jax.Array]]:
        """Gradient of a packed mini-batch, float32 like the parameters; the metrics' sums; each step's slots."""
        programs, grads, sums, results = self._programs, None, {}, []
        for step in packing.steps:
            arrays = self._place(step, columns)
            if grads is None:
                grads, sums, result = programs.first_gradient(self.params, arrays, *scalars)
            else:
                grads, sums, result = programs.next_gradient(self.params, grads, sums, arrays, *scalars)
            results.append(result)
        if grads is None:  # nothing to compute: weight decay and momentum still act
            grads = programs.no_gradient(self.params)
        return grads, sums, results

    def _apply(self, grads: Any) -> float:
        """One optimizer step, unless the gradient's norm is not finite; returns the norm."""
        self.params, self.state, norm = self._programs.apply(self.params, self.state, grads)
        self.version += math.isfinite(float(norm))
        return float(norm)

    def _place(self, step: MicroStep, columns: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """A micro-step's arrays on the devices, each process contributing its own pieces."""
        placements = self._programs.placements(step, columns)
        return {name: _to_devices(array, sharding) for name, (array, sharding) in placements.items()}

    def _load(self, folder: str | Path, dtype: Any, adapter: str | None = None) -> Any:
        shardings = self._programs.parameter_shardings
        state = load_params(folder, self.model, shardings=shardings, dtype=dtype, seed=self.seed, adapter=adapter)
        return nest({path: leaf.get_value() for path, leaf in flatten(state)})


def _to_devices(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
