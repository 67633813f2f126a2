"""The compiled programs of the policy: log-probs, the gradient of one micro-step, and the optimizer step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_ppo.algorithms.aggregation import reject_in_loss, weighted_sum
from jaxrl_ppo.algorithms.correction import correct_in_loss
from jaxrl_ppo.algorithms.kl import kl_penalty
from jaxrl_ppo.algorithms.masked import packed_sequence_sum
from jaxrl_ppo.algorithms.policy_losses import PolicyLossInputs, compute_policy_loss
from jaxrl_ppo.models.decoder import Decoder
from jaxrl_ppo.models.parameters import abstract_params, flatten, nest, parameter_specs, to_state
from jaxrl_ppo.sharding.rules import ShardingRules
from jaxrl_ppo.training.head import gather_sources, token_log_probs
from jaxrl_ppo.training.optimizer import apply_gradients

if TYPE_CHECKING:
    from jaxrl_ppo.algorithms.registry import PolicyLoss
    from jaxrl_ppo.models.architecture import DecoderConfig
    from jaxrl_ppo.schema.config import ActorConfig, RolloutCorrectionConfig

Tree = Any  # nested dict of arrays, like the parameters
Arrays = dict[str, jax.Array]

# How the arrays of a micro-step are laid out: rows [G * K, S] and slots [G, T].
REJECTED = "rejected"  # among a micro-step's sums: what rejection takes from the divisor
ROWS = ("tokens", "positions", "segment_ids", "branch_ids")


def parameter_shardings(config: DecoderConfig, mesh: Mesh, rules: ShardingRules) -> Tree:
    """A nested dict like the parameters with the placement of each."""
    specs = parameter_specs(config)
    return nest({path: rules.sharding(mesh, spec.axes, spec.shape) for path, spec in specs.items()})


def decayed_parameters(config: DecoderConfig) -> Tree:
    """A nested dict like the parameters: True where weight decay applies, i.e. not to norms and biases."""
    return nest({path: path.rsplit(".", 1)[1] not in ("scale", "bias") for path in parameter_specs(config)})


def state_shardings(optimizer: optax.GradientTransformation, params: Tree, shardings: Tree, mesh: Mesh) -> Tree:
    """Placements of the optimizer's state: each moment lies as its parameter does, counters everywhere."""
    state = jax.eval_shape(optimizer.init, params)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, state, shardings, transform_non_params=lambda _: everywhere
    )


class PolicyPrograms:
    """Jitted functions of the policy on one mesh. They hold no state: parameters go in and come out.

    `correction` are the settings of rollout correction where the loss has to make it (bypass mode), else None.
    `arrays` are a micro-step's: rows, slots, and its columns. Shapes are those of `training/packing.py`.
    """

    def __init__(
        self,
        model: DecoderConfig,
        actor: ActorConfig,
        loss: PolicyLoss,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        rules: ShardingRules,
        *,
        correction: RolloutCorrectionConfig | None,
        dtype: Any,
        remat: str,
        attention: str,
    ):
        self.model, self.actor, self.loss, self.mesh, self.correction = model, actor, loss, mesh, correction
        self.rejecting = correction is not None and correction.rollout_rs is not None
        make = functools.partial(Decoder, model, dtype=dtype, remat=remat, attention=attention)
        self._graph = nnx.graphdef(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
        everywhere = NamedSharding(mesh, PartitionSpec())
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self.parameter_shardings = parameter_shardings(model, mesh, rules)
        abstract = nest({path: leaf.get_value() for path, leaf in flatten(abstract_params(model))})
        self.state_shardings = state_shardings(optimizer, abstract, self.parameter_shardings, mesh)
        self.row_sharding = NamedSharding(mesh, rules.spec(("rows", "length")))
        self.slot_sharding = NamedSharding(mesh, rules.spec(("rows", None)))
        placed = (self.parameter_shardings, everywhere)

        self.init_state = jax.jit(optimizer.init, out_shardings=self.state_shardings)
        self.log_probs = jax.jit(self._log_probs, out_shardings=everywhere)
        self.first_gradient = jax.jit(self._gradient, out_shardings=(*placed, everywhere))
        self.next_gradient = jax.jit(self._add_gradient, out_shardings=(*placed, everywhere), donate_argnums=(1, 2))
        self.scale = jax.jit(
            lambda tree, factor: jax.tree.map(lambda leaf: leaf * factor, tree),
            out_shardings=self.parameter_shardings,
            donate_argnums=0,
        )
        self.no_gradient = jax.jit(
            functools.partial(jax.tree.map, jnp.zeros_like), out_shardings=self.parameter_shardings
        )
        self.apply = jax.jit(
            functools.partial(apply_gradients, optimizer, actor.optim.clip_grad),
            out_shardings=(self.parameter_shardings, self.state_shardings, everywhere),
            donate_argnums=(0, 1),
            # Without it XLA:CPU copies both moments before it overwrites them.
            compiler_options={"xla_cpu_copy_insertion_use_region_analysis": True} if on_cpu else None,
        )

    def _predict(
        self, params: Tree, arrays: Arrays, temperature: jax.Array, with_entropy: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        decoder = nnx.merge(self._graph, to_state(dict(flatten(params)), self.model))
        hidden = decoder.hidden(*(arrays.get(name) for name in ROWS))
        sources = gather_sources(hidden, arrays["source"])
        chunk = self.actor.log_prob_chunk_size
        return token_log_probs(sources, decoder.head(), arrays["target"], temperature, chunk, with_entropy)

    def _log_probs(self, params: Tree, arrays: Arrays, temperature: jax.Array) -> jax.Array:
        """Log-probs of a micro-step's targets, float32 [G, T]."""
        return self._predict(params, arrays, temperature, False)[0]

    def _loss(self, params: Tree, arrays: Arrays, temperature: jax.Array) -> tuple[jax.Array, tuple[Arrays, jax.Array]]:
        """A micro-step's part of the mini-batch's loss; its parts of the metrics, which are sums; its log-probs."""
        actor, weights, mask = self.actor, arrays["weights"], arrays["mask"]
        want_entropy = actor.calculate_entropy or actor.entropy_coeff != 0
        log_probs, entropy = self._predict(params, arrays, temperature, want_entropy)
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
                mode = self.loss.aggregation or actor.loss_agg_mode
                weights, sums[REJECTED] = reject_in_loss(mode, weights, mask, corrected.mask, sequence_sum, 1)
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
        return loss, (sums, jax.lax.stop_gradient(log_probs))

    def _gradient(self, params: Tree, arrays: Arrays, temperature: jax.Array) -> tuple[Tree, Arrays, jax.Array]:
        grads, (sums, log_probs) = jax.grad(self._loss, has_aux=True)(params, arrays, temperature)
        return grads, sums, log_probs

    def _add_gradient(
        self, params: Tree, grads: Tree, sums: Arrays, arrays: Arrays, temperature: jax.Array
    ) -> tuple[Tree, Arrays, jax.Array]:
        *more, log_probs = self._gradient(params, arrays, temperature)
        grads, sums = jax.tree.map(jnp.add, (grads, sums), tuple(more))
        return grads, sums, log_probs
