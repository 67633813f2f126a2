"""The trained policy on a mesh: log-probs and updates of batches, from host arrays to metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_ppo.algorithms.diagnostics import rollout_metrics
from jaxrl_ppo.models.lora import adapter_off
from jaxrl_ppo.schema.records import Batch, Prompt
from jaxrl_ppo.training.compilation import CompileCounter
from jaxrl_ppo.training.minibatches import MiniBatch, make_mini_batch, optimizer_steps
from jaxrl_ppo.training.model_trainer import ModelTrainer
from jaxrl_ppo.training.optimizer import learning_rate
from jaxrl_ppo.training.packing import Packing, pack
from jaxrl_ppo.training.programs import REJECTED
from jaxrl_ppo.training.setup import DTYPES, log_prob_limits, policy_model, policy_programs, update_limits
from jaxrl_ppo.training.totals import Totals

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import ActorRolloutRefConfig, AlgorithmConfig

WEIGHTED = ("pg_loss", "entropy", "kl_loss", "aux_loss")  # metrics aggregated as the loss is


class PolicyTrainer(ModelTrainer):
    """The policy, its optimizer and the reference policy. `total_steps` is the run's number of optimizer steps."""

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        algorithm: AlgorithmConfig,
        *,
        model_folder: str | Path,
        mesh: Mesh,
        total_steps: int,
        needs_reference: bool,
        seed: int,
    ):
        """Load the model of `model_folder` onto `mesh`.

        Raises ModelFolderError, ShardingError, ValueError or UserCodeError for what the configuration names wrongly.
        """
        self.config, self.algorithm = config, algorithm
        actor = config.actor
        model = policy_model(config.model, model_folder)
        self.learning_rate = learning_rate(actor.optim, total_steps)
        self.programs = policy_programs(config, algorithm, model, mesh, total_steps)
        self.loss = self.programs.loss
        self.compiled = CompileCounter()
        super().__init__(
            self.programs,
            actor.checkpoint,
            folder=model_folder,
            dtype=DTYPES[actor.fsdp_config.model_dtype],
            seed=seed,
            offload=actor.fsdp_config.param_offload,
            adapter=config.model.lora_adapter_path,
        )
        self._needs_reference = needs_reference
        self.reference = None
        if needs_reference and model.lora is None:
            self.reference = self._load(model_folder, self.programs.dtype)
            if config.ref.fsdp_config.param_offload:
                self.reference = self.programs.to_hosts(self.reference)
        self.temperature = np.float32(max(config.rollout.temperature, 1e-8))
        self._update_limits = update_limits(config, model, self.programs.layout)
        self._log_prob_limits = log_prob_limits(config, model, self.programs.layout)

    def log_probs(self, batch: Batch, temperature: float | None = None) -> np.ndarray:
        """Log-probs of the responses under the current weights, at the sampling temperature if None: float32 [B, T].

        0 outside the mask. Raises PackingError when a sample exceeds ref.log_prob_max_token_len_per_gpu.
        """
        at = self.temperature if temperature is None else np.float32(temperature)
        with self.in_use():
            return self._log_probs(self.params, batch, at)

    def ref_log_probs(self, batch: Batch) -> np.ndarray:
        """The same under the reference policy's weights: with LoRA, this model's own without the adapter.

        Raises ValueError when there is none.
        """
        if not self._needs_reference:
            raise ValueError("there is no reference policy: this trainer was made with needs_reference=False")
        if self.reference is not None:
            params = self.reference
            if self.config.ref.fsdp_config.param_offload:
                params = self.programs.to_devices(params)
            return self._log_probs(params, batch, self.temperature)
        with self.in_use():
            return self._log_probs(adapter_off(self.params), batch, self.temperature)

    def sum_pi_squared(self, batch: Batch, log_probs: np.ndarray | None) -> np.ndarray:
        """The sum over the vocabulary of the squared probabilities of each response token's distribution.

        Under the current weights and the sampling temperature; float32 [B, T], 0 outside the mask. `log_probs` are
        `log_probs(batch)`, where those are known already. With p the policy at the sampling temperature and q at half
        of it, q(t) = p(t)^2 / sum(p^2): a second pass at half the temperature gives the sum from the same program.
        """
        if log_probs is None:
            log_probs = self.log_probs(batch)
        at_half = self.log_probs(batch, float(self.temperature) / 2)
        return np.where(batch.response_mask > 0, np.exp(2 * log_probs - at_half), 0).astype(np.float32)

    def score_tokens(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-prob of each token after the first given those before it, temperature 1: float32 [len - 1]."""
        prompt = Prompt(0, (int(token_ids[0]),), [], "", None, {})
        rest = np.asarray([token_ids[1:]], np.int32)
        ones = np.ones(rest.shape, np.float32)
        batch = Batch([prompt], np.zeros(1, np.int32), rest, ones, ones, rest, np.zeros(1, np.float32))
        return self.log_probs(batch, 1)[0]

    def update(self, batch: Batch) -> dict[str, float]:
        """All optimizer steps of one batch; returns `actor/*` metrics.

        Needs the batch's advantages. Old log-probs that are missing are those of the current weights: taken from the
        step itself when the batch makes a single one, else computed first. Samples that can change neither loss nor
        gradient are not computed; `actor/ppo_kl`, `training/rollout_probs_diff_*` and `rollout_corr/*` are over the
        tokens that are, whose share is `actor/computed_token_ratio`. Every other metric is over all tokens. Raises
        PackingError when a sample exceeds the token limit.

        In bypass mode nothing else compares trainer and engine, so the update does: each token's log-prob at its first
        use, before the optimizer step that it is part of, with the engine's.
        """
        compiled, actor = self.compiled.count, self.config.actor
        steps = list(
            optimizer_steps(
                batch,
                (self.seed, self.updates),
                epochs=actor.ppo_epochs,
                prompts_per_step=actor.ppo_mini_batch_size,
                shuffle=actor.shuffle,
            )
        )
        totals = Totals("actor", WEIGHTED, computed=("ppo_kl",))
        first_seen = np.full(batch.response_mask.shape, np.nan, np.float32)
        with self.in_use():
            if batch.old_log_probs is None and len(steps) > 1:
                batch.old_log_probs = self.log_probs(batch)
            for samples, seed in steps:
                mini_batch = make_mini_batch(
                    batch,
                    samples,
                    actor,
                    self.loss,
                    response_length=self.config.rollout.response_length,
                    seed=seed,
                    rejecting=self.programs.rejecting,
                )
                grads, sums, packing = self.gradient(batch, mini_batch, first_seen)
                totals.add(mini_batch, packing, sums, self._apply(grads))
        self.updates += 1
        metrics = totals.metrics()
        if self.algorithm.rollout_correction.bypass_mode:
            seen = (batch.response_mask > 0) & np.isfinite(first_seen)
            metrics |= rollout_metrics(first_seen, batch.rollout_log_probs, seen)
        return metrics | {
            "actor/lr": float(self.learning_rate(max(self.version - 1, 0))),
            "training/compilations": float(self.compiled.count - compiled),
        }

    def gradient(
        self, batch: Batch, mini_batch: MiniBatch, log_probs: np.ndarray | None = None
    ) -> tuple[Any, dict[str, jax.Array], Packing]:
        """Gradient of one optimizer step's loss, float32 like the parameters; the metrics' sums; how it was packed.

        Log-probs of computed tokens are put into `log_probs` [B, T], where it is NaN.
        """
        packing = pack(batch, mini_batch.computed, self._update_limits)
        grads, sums, results = self._accumulate(packing, self.programs.columns(mini_batch), self.temperature)
        if log_probs is not None:
            latest = np.full_like(log_probs, np.nan)
            for step, result in zip(packing.steps, results):
                step.put(np.asarray(result), latest)
            np.copyto(log_probs, latest, where=np.isnan(log_probs))
        if REJECTED in sums:
            whole_sequences = self.programs.aggregation != "token-mean"
            rejected = float(sums.pop(REJECTED)) / (len(mini_batch.samples) if whole_sequences else 1)
            if 0 < rejected < 1:
                factor = np.float32(1 / (1 - rejected))
                grads = self.programs.scale(grads, factor)
                sums = {k: v * factor if k in WEIGHTED else v for k, v in sums.items()}
        return grads, sums, packing

    def _log_probs(self, params: Any, batch: Batch, temperature: np.float32) -> np.ndarray:
        packing = pack(batch, range(len(batch.group)), self._log_prob_limits)
        out = np.zeros(batch.response_mask.shape, np.float32)
        results = [self.programs.log_probs(params, self._place(step, {}), temperature) for step in packing.steps]
        for step, result in zip(packing.steps, results):
            step.put(np.asarray(result), out)
        return out
