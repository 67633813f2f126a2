"""The critic on a mesh: values and updates of batches, from host arrays to metrics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jax.sharding import Mesh

from jaxrl_ppo.models.config import load_decoder_config
from jaxrl_ppo.training.minibatches import make_value_mini_batch, optimizer_steps
from jaxrl_ppo.training.model_trainer import ModelTrainer
from jaxrl_ppo.training.optimizer import learning_rate
from jaxrl_ppo.training.packing import pack
from jaxrl_ppo.training.setup import DTYPES, critic_limits, critic_programs
from jaxrl_ppo.training.totals import Totals

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import ActorRolloutRefConfig, CriticConfig
    from jaxrl_ppo.schema.records import Batch


class CriticTrainer(ModelTrainer):
    """The critic and its optimizer. `total_steps` is the run's number of the critic's optimizer steps.

    Data types, rematerialisation, prefix sharing and shuffling are the actor's.
    """

    def __init__(
        self,
        critic: CriticConfig,
        policy: ActorRolloutRefConfig,
        *,
        model_folder: str | Path,
        mesh: Mesh,
        total_steps: int,
        seed: int,
    ):
        """Load the model of `model_folder` onto `mesh`; a language model gets a new value head, drawn from `seed`.

        Raises ModelFolderError, ShardingError or ValueError for what the configuration names wrongly.
        """
        self.config, self.policy = critic, policy
        actor = policy.actor
        model = load_decoder_config(model_folder, "value")
        self.learning_rate = learning_rate(critic.optim, total_steps)
        self.programs = critic_programs(critic, policy, model, mesh, total_steps)
        super().__init__(
            self.programs,
            critic.checkpoint,
            folder=model_folder,
            dtype=DTYPES[actor.fsdp_config.model_dtype],
            seed=seed,
            offload=actor.fsdp_config.param_offload,
        )
        self._packing_limits = critic_limits(critic, policy, model, self.programs.layout)

    def values(self, batch: Batch) -> np.ndarray:
        """The value before each response token, float32 [B, T]; 0 outside the mask.

        Raises PackingError when a sample exceeds critic.ppo_max_token_len_per_gpu.
        """
        packing = pack(batch, range(len(batch.group)), self._packing_limits)
        out = np.zeros(batch.response_mask.shape, np.float32)
        with self.in_use():
            results = [self.programs.values(self.params, self._place(step, {})) for step in packing.steps]
        for step, result in zip(packing.steps, results):
            step.put(np.asarray(result), out)
        return out

    def update(self, batch: Batch) -> dict[str, float]:
        """All optimizer steps of one batch, which needs its values and returns; returns `critic/*` metrics.

        Raises PackingError when a sample exceeds the token limit.
        """
        actor = self.policy.actor
        totals = Totals("critic", weighted=("vf_loss",))
        steps = optimizer_steps(
            batch,
            (self.seed, self.updates),
            epochs=self.config.ppo_epochs,
            prompts_per_step=self.config.ppo_mini_batch_size,
            shuffle=actor.shuffle,
        )
        with self.in_use():
            for samples, _ in steps:
                mini_batch = make_value_mini_batch(
                    batch,
                    samples,
                    self.config.loss_agg_mode,
                    actor.loss_scale_factor or self.policy.rollout.response_length,
                )
                packing = pack(batch, mini_batch.computed, self._packing_limits)
                grads, sums, _ = self._accumulate(packing, mini_batch.columns)
                totals.add(mini_batch, packing, sums, self._apply(grads))
        self.updates += 1
        return totals.metrics() | {"critic/lr": float(self.learning_rate(max(self.version - 1, 0)))}
