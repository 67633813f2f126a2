"""The compiled programs of the policy: log-probs, and the loss of one micro-step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_ppo.algorithms.aggregation import reject_in_loss, weighted_sum
from jaxrl_ppo.algorithms.correction import correct_in_loss
from jaxrl_ppo.algorithms.kl import kl_penalty
from jaxrl_ppo.algorithms.masked import packed_sequence_sum
from jaxrl_ppo.algorithms.policy_losses import PolicyLossInputs, compute_policy_loss
from jaxrl_ppo.sharding.layout import Layout
from jaxrl_ppo.training.head import token_log_probs
from jaxrl_ppo.training.model_programs import Arrays, ModelPrograms, Tree

if TYPE_CHECKING:
    from jaxrl_ppo.algorithms.registry import PolicyLoss
    from jaxrl_ppo.models.architecture import DecoderConfig
    from jaxrl_ppo.schema.config import ActorConfig, RolloutCorrectionConfig
    from jaxrl_ppo.training.minibatches import MiniBatch

SHARE = "share"  # a column: what part of the mini-batch's targets each is
LOST = "lost"  # another: what the divisor loses of that with a target that is rejected
REJECTED = "rejected"  # among a micro-step's sums: what rejection takes from the divisor


class PolicyPrograms(ModelPrograms):
    """Jitted functions of the policy. The loss's one scalar is the sampling temperature.

    `correction` are the settings of rollout correction where the loss has to make it (bypass mode), else None.
    `aggregation` is the loss's own, or loss_agg_mode.
    """

    def __init__(
        self,
        model: DecoderConfig,
        actor: ActorConfig,
        loss: PolicyLoss,
        optimizer: optax.GradientTransformation,
        layout: Layout,
        *,
        correction: RolloutCorrectionConfig | None,
        dtype: Any,
        remat: str,
        attention: str,
    ):
        super().__init__(
            model,
            optimizer,
            actor.optim.clip_grad,
            layout,
            dtype=dtype,
            remat=remat,
            attention=attention,
            offload_state=actor.fsdp_config.optimizer_offload,
        )
        self.actor, self.loss, self.correction = actor, loss, correction
        self.rejecting = correction is not None and correction.rollout_rs is not None
        self.aggregation = loss.aggregation or actor.loss_agg_mode
        self.log_probs = jax.jit(self._log_probs, out_shardings=self.everywhere)
        self.scale = jax.jit(
            lambda tree, factor: jax.tree.map(lambda leaf: leaf * factor, tree),
            out_shardings=self.trained_shardings,
            donate_argnums=0,
        )

    def columns(self, mini_batch: MiniBatch) -> dict[str, np.ndarray]:
        """What the loss needs of a mini-batch: its columns; for a load-balance loss also what share each target is."""
        if not self.model.balance_coef:
            return mini_batch.columns
        mask = mini_batch.columns["mask"]
        share = np.full(mask.shape, 1 / max(mini_batch.computed_tokens, 1), np.float32)
        if not self.rejecting:
            return mini_batch.columns | {SHARE: share}
        lost, sequences = share, len(mini_batch.samples)
        if self.aggregation == "token-sum":  # has no divisor
            lost = np.zeros_like(share)
        elif self.aggregation != "token-mean":
            # A sequence is 1 / sequences of the divisor, an empty one too: their part, which none can lose, is spread.
            lengths = np.sum(mask > 0, axis=1)
            empty = np.sum(lengths[mini_batch.samples] == 0)
            lost = np.broadcast_to(1 / (np.maximum(lengths, 1) * sequences), mask.T.shape).T.astype(np.float32)
            share = lost + share * np.float32(empty / sequences)
        return mini_batch.columns | {SHARE: share, LOST: lost}

    def _predict(
        self, params: Tree, arrays: Arrays, temperature: jax.Array, with_entropy: bool
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Log-probs of the targets; their entropy, if asked for; the load-balance loss, if there are experts."""
        decoder = self._decoder(params)
        sources, balance = self._sources(decoder, arrays)
        sources, target = self._spread(sources), self._spread(arrays["target"])
        # Gathered once, not for every chunk.
        kernel = self.layout.gather(decoder.head(), ("embed", "vocab"), (None, "vocab"))
        chunk, cap = self.actor.log_prob_chunk_size, self.model.logit_softcap
        outputs = token_log_probs(sources, kernel, target, temperature, chunk, with_entropy, cap)
        return *jax.tree.map(lambda x: x.reshape(arrays["target"].shape), outputs), balance

    def _spread(self, x: jax.Array) -> jax.Array:
        """[G, T, ...] -> [G * n, T / n, ...] with n the sequence axis: a piece for every device that has targets."""
        shares = self.layout.pieces("length")
        return x.reshape(x.shape[0] * shares, x.shape[1] // shares, *x.shape[2:])

    def _log_probs(self, params: Tree, arrays: Arrays, temperature: jax.Array) -> jax.Array:
        """Log-probs of a micro-step's targets, float32 [G, T]."""
        return self._predict(params, arrays, temperature, False)[0]

    def _loss(self, params: Tree, arrays: Arrays, temperature: jax.Array) -> tuple[jax.Array, tuple[Arrays, jax.Array]]:
        """A micro-step's part of the mini-batch's loss; its parts of the metrics, which are sums; its log-probs."""
        actor, weights, mask = self.actor, arrays["weights"], arrays["mask"]
        want_entropy = actor.calculate_entropy or actor.entropy_coeff != 0
        log_probs, entropy, balance = self._predict(params, arrays, temperature, want_entropy)
        sequence_sum = packed_sequence_sum(arrays["sequence"], mask.shape[1])
        # Without old log-probs the policy is the one that is about to be trained: the ratio is 1.
        old_log_probs = arrays.get("old_log_probs", jax.lax.stop_gradient(log_probs))
        importance_weights = arrays.get("importance_weights")
        sums: Arrays = {}
        if self.correction is not None:
            corrected = correct_in_loss(log_probs, arrays["rollout_log_probs"], mask, self.correction, sequence_sum)
            sums |= {name: jnp.sum(value * mask) for name, value in corrected.metrics.items()}
            old_log_probs, importance_weights = corrected.old_log_probs, corrected.importance_weights
            if self.correction.rollout_rs is not None:
                # A sequence counts 1 here: only the host knows how many there are to divide by.
                weights, sums[REJECTED] = reject_in_loss(
                    self.aggregation, weights, mask, corrected.mask, sequence_sum, 1
                )
                kept = mask * corrected.mask
                lost = mask - kept if self.aggregation == "token-mean" else mask * (sequence_sum(kept) == 0)
            mask = corrected.mask
        inputs = PolicyLossInputs(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            advantages=arrays["advantages"],
            mask=mask,
            importance_weights=importance_weights,
            rollout_log_probs=arrays.get("rollout_log_probs"),
            entropy=entropy,
            selected=arrays.get("selected"),
            sequence_sum=sequence_sum,
        )
        token_loss, per_token = compute_policy_loss(self.loss, inputs, actor)
        sums |= {name: jnp.sum(value) for name, value in per_token.items()}
        loss = sums["pg_loss"] = weighted_sum(token_loss, weights)
        if entropy is not None:
            sums["entropy"] = weighted_sum(entropy, weights)
            loss = loss - actor.entropy_coeff * sums["entropy"]
        if actor.use_kl_loss:
            kl = kl_penalty(log_probs, arrays["ref_log_probs"], mask, actor.kl_loss_type)
            sums["kl_loss"] = weighted_sum(kl, weights)
            loss = loss + actor.kl_loss_coef * sums["kl_loss"]
        if self.model.balance_coef and balance is not None:
            # Not linear in the tokens: a mini-batch's is the mean over its micro-steps', weighted by their targets.
            share = jnp.sum(arrays[SHARE])
            if self.rejecting:  # what is rejected has no weight, nor a part in the divisor that comes at the end
                share -= jnp.sum(arrays[LOST] * lost)
            sums["aux_loss"] = balance * share
            loss = loss + self.model.balance_coef * sums["aux_loss"]
        return loss, (sums, jax.lax.stop_gradient(log_probs))
