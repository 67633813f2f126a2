"""The trained policy on a mesh: log-probs and updates of batches, from host arrays to metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_ppo.algorithms.diagnostics import rollout_metrics
from jaxrl_ppo.algorithms.policy_losses import find_policy_loss
from jaxrl_ppo.models.config import load_decoder_config
from jaxrl_ppo.models.huggingface import load_params
from jaxrl_ppo.models.parameters import flatten, nest
from jaxrl_ppo.schema.records import Batch, Prompt
from jaxrl_ppo.sharding.rules import ShardingRules, axis_size
from jaxrl_ppo.training.checkpoint import EXTRA, MODEL, OPTIMIZER, StateStore, abstract
from jaxrl_ppo.training.compilation import CompileCounter
from jaxrl_ppo.training.minibatches import MiniBatch, make_mini_batch, optimizer_steps
from jaxrl_ppo.training.optimizer import learning_rate, make_optimizer
from jaxrl_ppo.training.packing import MicroStep, Packing, PackingLimits, pack
from jaxrl_ppo.training.programs import REJECTED, ROWS, PolicyPrograms, decayed_parameters

if TYPE_CHECKING:
    from jaxrl_ppo.models.architecture import DecoderConfig
    from jaxrl_ppo.schema.config import ActorRolloutRefConfig, AlgorithmConfig, RolloutCorrectionConfig

WEIGHTED = ("pg_loss", "entropy", "kl_loss")  # metrics aggregated as the loss is
DTYPES = {"fp32": jnp.float32, "float32": jnp.float32, "bf16": jnp.bfloat16, "bfloat16": jnp.bfloat16}


class PolicyTrainer:
    """The policy, its optimizer and the reference policy. Every process calls every method alike, with equal inputs.

    `total_steps` is the run's number of optimizer steps. `version` counts those done.
    """

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
        self.config, self.algorithm, self.mesh, self.seed = config, algorithm, mesh, seed
        actor = config.actor
        self.rules = ShardingRules()
        self.model = load_decoder_config(model_folder)
        self.loss = find_policy_loss(actor.policy_loss.loss_mode)
        self.optimizer = make_optimizer(actor.optim, total_steps, decayed_parameters(self.model))
        self.learning_rate = learning_rate(actor.optim, total_steps)
        dtype = DTYPES[actor.fsdp_config.dtype]
        self.programs = PolicyPrograms(
            self.model,
            actor,
            self.loss,
            self.optimizer,
            mesh,
            self.rules,
            correction=_correction_in_loss(algorithm),
            dtype=dtype,
            remat=_remat(config.model.enable_gradient_checkpointing),
            attention="xla",
        )
        self.compiled = CompileCounter()
        self.params = self._load(model_folder, DTYPES[actor.fsdp_config.model_dtype])
        self.state = self.programs.init_state(self.params)
        self.reference = self._load(model_folder, dtype) if needs_reference else None
        self.version = 0
        self.updates = 0
        self._store = StateStore(asynchronous=actor.checkpoint.async_save)
        self.temperature = np.float32(max(config.rollout.temperature, 1e-8))
        self._update_limits = self._limits(
            None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
            actor.ppo_max_token_len_per_gpu,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        )
        self._log_prob_limits = self._limits(
            None if config.ref.log_prob_use_dynamic_bsz else config.ref.log_prob_micro_batch_size_per_gpu,
            config.ref.log_prob_max_token_len_per_gpu,
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        )

    def log_probs(self, batch: Batch) -> np.ndarray:
        """Log-probs of the responses under the current weights and the sampling temperature: float32 [B, T].

        0 outside the mask. Raises PackingError when a sample exceeds ref.log_prob_max_token_len_per_gpu.
        """
        return self._log_probs(self.params, batch, self.temperature)

    def ref_log_probs(self, batch: Batch) -> np.ndarray:
        """The same under the reference policy's weights. Raises ValueError when there is none."""
        if self.reference is None:
            raise ValueError("there is no reference policy: this trainer was made with needs_reference=False")
        return self._log_probs(self.reference, batch, self.temperature)

    def score_tokens(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-prob of each token after the first given those before it, temperature 1: float32 [len - 1]."""
        prompt = Prompt(0, (int(token_ids[0]),), [], "", None, {})
        rest = np.asarray([token_ids[1:]], np.int32)
        ones = np.ones(rest.shape, np.float32)
        batch = Batch([prompt], np.zeros(1, np.int32), rest, ones, ones, rest, np.zeros(1, np.float32))
        return self._log_probs(self.params, batch, np.float32(1))[0]

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
        compiled = self.compiled.count
        steps = list(optimizer_steps(batch, self.config.actor, (self.seed, self.updates)))
        if batch.old_log_probs is None and len(steps) > 1:
            batch.old_log_probs = self.log_probs(batch)
        totals = _Totals()
        first_seen = np.full(batch.response_mask.shape, np.nan, np.float32)
        for samples, seed in steps:
            mini_batch = make_mini_batch(
                batch,
                samples,
                self.config.actor,
                self.loss,
                response_length=self.config.rollout.response_length,
                seed=seed,
                rejecting=self.programs.rejecting,
            )
            self._optimizer_step(batch, mini_batch, totals, first_seen)
        self.updates += 1
        metrics = totals.metrics()
        if self.algorithm.rollout_correction.bypass_mode:
            seen = (batch.response_mask > 0) & np.isfinite(first_seen)
            metrics |= rollout_metrics(first_seen, batch.rollout_log_probs, seen)
        return metrics | {
            "actor/lr": float(self.learning_rate(max(self.version - 1, 0))),
            "training/compilations": float(self.compiled.count - compiled),
        }

    def save(self, folder: str | Path) -> None:
        """Start saving what actor.checkpoint.save_contents names; returns once the next update cannot touch it.

        `extra` is what the next update's shuffle depends on. `hf_model` is `save_pretrained`'s business.
        """
        parts = {
            MODEL: self.params,
            OPTIMIZER: self.state,
            EXTRA: {"version": self.version, "updates": self.updates, "seed": self.seed},
        }
        wanted = self.config.actor.checkpoint.save_contents
        self._store.save(folder, {name: part for name, part in parts.items() if name in wanted})

    def wait_until_saved(self) -> None:
        """Return when the last save is on disk; raises what went wrong with it."""
        self._store.wait()

    def restore(self, folder: str | Path) -> None:
        """Take up the parts of a saved state that actor.checkpoint.load_contents names, on this trainer's mesh.

        Raises StateError when the folder is incomplete or another model's.
        """
        parts = {
            MODEL: abstract(self.params, self.programs.parameter_shardings),
            OPTIMIZER: abstract(self.state, self.programs.state_shardings),
            EXTRA: None,
        }
        wanted = self.config.actor.checkpoint.load_contents
        found = self._store.restore(folder, {name: part for name, part in parts.items() if name in wanted})
        self.params = found.get(MODEL, self.params)
        self.state = found.get(OPTIMIZER, self.state)
        if EXTRA in found:
            self.version, self.updates = found[EXTRA]["version"], found[EXTRA]["updates"]

    def gradient(
        self, batch: Batch, mini_batch: MiniBatch, log_probs: np.ndarray | None = None
    ) -> tuple[Any, dict[str, jax.Array], Packing]:
        """Gradient of one optimizer step's loss, float32 like the parameters; the metrics' sums; how it was packed.

        Log-probs of computed tokens are put into `log_probs` [B, T], where it is NaN.
        """
        packing = pack(batch, mini_batch.computed, self._update_limits)
        grads, sums, results = None, {}, []
        for step in packing.steps:
            arrays = self._place(step, mini_batch.columns)
            if grads is None:
                grads, sums, result = self.programs.first_gradient(self.params, arrays, self.temperature)
            else:
                grads, sums, result = self.programs.next_gradient(self.params, grads, sums, arrays, self.temperature)
            results.append(result)
        if log_probs is not None:
            latest = np.full_like(log_probs, np.nan)
            for step, result in zip(packing.steps, results):
                step.put(np.asarray(result), latest)
            np.copyto(log_probs, latest, where=np.isnan(log_probs))
        if REJECTED in sums:
            whole_sequences = (self.loss.aggregation or self.config.actor.loss_agg_mode) != "token-mean"
            rejected = float(sums.pop(REJECTED)) / (len(mini_batch.samples) if whole_sequences else 1)
            if 0 < rejected < 1:
                factor = np.float32(1 / (1 - rejected))
                grads = self.programs.scale(grads, factor)
                sums = {k: v * factor if k in WEIGHTED else v for k, v in sums.items()}
        if grads is None:  # no sample has a signal: weight decay and momentum still act
            grads = self.programs.no_gradient(self.params)
        return grads, sums, packing

    def _optimizer_step(self, batch: Batch, mini_batch: MiniBatch, totals: _Totals, first_seen: np.ndarray) -> None:
        grads, sums, packing = self.gradient(batch, mini_batch, first_seen)
        self.params, self.state, norm = self.programs.apply(self.params, self.state, grads)
        applied = math.isfinite(float(norm))
        self.version += applied
        totals.add(mini_batch, packing, {k: float(v) for k, v in sums.items()}, float(norm), applied)

    def _log_probs(self, params: Any, batch: Batch, temperature: np.float32) -> np.ndarray:
        packing = pack(batch, range(len(batch.group)), self._log_prob_limits)
        out = np.zeros(batch.response_mask.shape, np.float32)
        results = [self.programs.log_probs(params, self._place(step, {}), temperature) for step in packing.steps]
        for step, result in zip(packing.steps, results):
            step.put(np.asarray(result), out)
        return out

    def _place(self, step: MicroStep, columns: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """A micro-step's arrays on the devices, each process contributing its own pieces."""
        rows = {name: getattr(step, name) for name in ROWS}
        slots = {name: getattr(step, name) for name in ("source", "target", "sequence")}
        slots |= {name: step.take(column) for name, column in columns.items()}
        return {
            name: _to_devices(array, sharding)
            for arrays, sharding in ((rows, self.programs.row_sharding), (slots, self.programs.slot_sharding))
            for name, array in arrays.items()
            if array is not None
        }

    def _limits(self, sequences: int | None, tokens: int, key: str) -> PackingLimits:
        return PackingLimits(
            groups=axis_size(self.mesh, self.rules.rows),
            tokens=None if sequences else tokens,
            tokens_key=key,
            sequences=sequences,
            share_prefix=self.config.actor.prefix_sharing != "false",
            attention_cost=_attention_cost(self.model),
        )

    def _load(self, folder: str | Path, dtype: Any) -> Any:
        state = load_params(folder, self.model, shardings=self.programs.parameter_shardings, dtype=dtype)
        return nest({path: leaf.get_value() for path, leaf in flatten(state)})


def _correction_in_loss(algorithm: AlgorithmConfig) -> RolloutCorrectionConfig | None:
    """Rollout correction is the loss's own business in bypass mode, where no old log-probs are known before it."""
    settings = algorithm.rollout_correction
    active = settings.rollout_is is not None or settings.rollout_rs is not None
    return settings if settings.bypass_mode and active else None


def _to_devices(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _remat(enabled: bool) -> str:
    if not enabled:
        return "none"
    # On CPU memory traffic is dear: keeping the projections' results is faster than keeping all or nothing.
    return "dots" if jax.default_backend() == "cpu" else "full"


def _attention_cost(model: DecoderConfig) -> float:
    """Cost of one token's attention per token of row length, relative to the matrix products of its layer.

    Half of a row's scores are computed, and masked; they are small products with a softmax between them, so that a
    floating-point operation there costs about four times one in the large products (measured on CPU).
    """
    attention = 2 * 2 * model.num_heads * model.head_dim
    projections = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    return attention / (projections + 3 * model.hidden_size * model.intermediate_size)


class _Totals:
    """Sums over an update's optimizer steps, from which its metrics come. Skipped steps count as skipped only."""

    def __init__(self) -> None:
        self.skipped = self.applied = 0
        self.tokens = self.computed_tokens = self.used = self.slots = 0
        self.norm = 0.0
        self.sums: dict[str, float] = {}

    def add(self, mini_batch: MiniBatch, packing: Packing, sums: dict[str, float], norm: float, applied: bool) -> None:
        self.used += packing.used
        self.slots += packing.slots
        if not applied:
            self.skipped += 1
            return
        self.applied += 1
        self.norm += norm
        self.tokens += mini_batch.tokens
        self.computed_tokens += mini_batch.computed_tokens
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        out = {
            "actor/skipped_updates": float(self.skipped),
            "actor/padding_waste": 1 - self.used / self.slots if self.slots else 0.0,
        }
        if self.applied:
            out["actor/grad_norm"] = self.norm / self.applied
            out["actor/computed_token_ratio"] = self.computed_tokens / max(self.tokens, 1)
        for name, total in self.sums.items():
            if name in WEIGHTED:
                divisor = self.applied
            else:
                computed = name == "ppo_kl" or name.startswith("rollout_corr/")
                divisor = self.computed_tokens if computed else self.tokens
            out[name if "/" in name else f"actor/{name}"] = total / max(divisor, 1)
        return out
