"""The fullest batch a configuration allows, packed as a run packs it, and the abstract arguments of each program."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.schema.records import Batch, Prompt
from jaxrl_ppo.training.minibatches import make_mini_batch
from jaxrl_ppo.training.packing import Packing, PackingLimits, pack
from jaxrl_ppo.training.setup import DTYPES, log_prob_limits, policy_programs, update_limits

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxrl_ppo.models.architecture import DecoderConfig
    from jaxrl_ppo.schema.config import Config
    from jaxrl_ppo.training.programs import PolicyPrograms


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One program to compile: a jitted function, its abstract arguments, and what else lies in memory meanwhile.

    `resident` names what the program does not take but the run keeps on every chip, in bytes. `runs` is how often the
    program runs in one step, `tokens` how many real tokens one run has (0: it works on parameters alone).
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    resident: dict[str, float]
    runs: int
    shape: str


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Everything a step compiles, and the lengths of the sequences that it trains on."""

    works: list[Work]
    programs: PolicyPrograms
    lengths: np.ndarray
    optimizer_steps: int
    kept: dict[str, float]


def make_workload(config: Config, model: DecoderConfig, mesh: Mesh, *, needs_reference: bool) -> Workload:
    """The programs of one step of `config` on `mesh`, whose devices need not be here; nothing is allocated on them.

    Every prompt and response is as long as it may be: that is the most memory and the most work a step can take.
    Raises PackingError when such a sample does not fit into the token limits, ValueError, UserCodeError or
    ShardingError for what the configuration names wrongly.
    """
    roles, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    steps = config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    programs = policy_programs(roles, config.algorithm, model, mesh, total_steps=max(steps, 1))
    layout = programs.layout
    params = programs.abstract_params(DTYPES[actor.fsdp_config.model_dtype])
    state = jax.tree.map(_placed, jax.eval_shape(programs.init_state, params), programs.state_shardings)
    grads = programs.trained(params)
    kept = {"optimizer state": bytes_per_chip(state)}
    if needs_reference and model.lora is None:  # with LoRA it is the policy without the adapter
        kept["reference policy"] = bytes_per_chip(programs.abstract_params(programs.dtype))
    reference = {name: size for name, size in kept.items() if name == "reference policy"}
    temperature = jax.ShapeDtypeStruct((), jnp.float32)

    batch = _fullest(config, actor.ppo_mini_batch_size, roles.actor.use_kl_loss)
    everything = np.arange(len(batch.group))
    mini_batch = make_mini_batch(
        batch,
        everything,
        actor,
        programs.loss,
        response_length=roles.rollout.response_length,
        seed=0,
        rejecting=programs.rejecting,
    )
    packing, arrays = _packed(programs, batch, update_limits(roles, model, layout), programs.columns(mini_batch))
    micro_steps = len(packing.steps)
    works = []
    if micro_steps == 1:
        arguments: tuple[Any, ...] = (params, arrays, temperature)
        function, name = programs.first_gradient, "actor gradient"
    else:
        sums = jax.eval_shape(programs.first_gradient, params, arrays, temperature)[1]
        arguments = (params, grads, sums, arrays, temperature)
        function, name = programs.next_gradient, "actor gradient"
    works.append(Work(name, function, arguments, kept, steps * micro_steps, _shape(packing)))
    works.append(Work("actor optimizer", programs.apply, (params, state, grads), reference, steps, "parameters"))
    packing, arrays = _packed(programs, batch, log_prob_limits(roles, model, layout), {})
    whole_batch = config.data.train_batch_size // actor.ppo_mini_batch_size
    passes = (2 if needs_reference else 1) * whole_batch
    works.append(
        Work(
            "log-probs",
            programs.log_probs,
            (params, arrays, temperature),
            kept,
            passes * len(packing.steps),
            _shape(packing),
        )
    )
    length = config.data.max_prompt_length + roles.rollout.response_length
    samples = config.data.train_batch_size * roles.rollout.n
    return Workload(works, programs, np.full(samples, length), steps, kept)


def _fullest(config: Config, prompts: int, with_reference: bool) -> Batch:
    rollout = config.actor_rollout_ref.rollout
    size, length = prompts * rollout.n, rollout.response_length
    tokens = tuple(range(config.data.max_prompt_length))
    ones = np.ones((size, length), np.float32)
    correction = config.algorithm.rollout_correction
    return Batch(
        prompts=[Prompt(i, tokens, [], "", None, {}) for i in range(prompts)],
        group=np.repeat(np.arange(prompts, dtype=np.int32), rollout.n),
        response_ids=np.zeros((size, length), np.int32),
        response_mask=ones,
        rollout_log_probs=ones,
        versions=np.zeros((size, length), np.int32),
        scores=np.ones(size, np.float32),
        old_log_probs=None if correction.bypass_mode else ones,
        ref_log_probs=ones if with_reference else None,
        advantages=ones,
        importance_weights=ones if correction.rollout_is and not correction.bypass_mode else None,
    )


def _packed(
    programs: PolicyPrograms, batch: Batch, limits: PackingLimits, columns: dict[str, np.ndarray]
) -> tuple[Packing, dict[str, jax.ShapeDtypeStruct]]:
    packing = pack(batch, range(len(batch.group)), limits)
    placements = programs.placements(packing.steps[0], columns)
    return packing, {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        for name, (array, sharding) in placements.items()
    }


def _shape(packing: Packing) -> str:
    rows, length = packing.steps[0].tokens.shape
    pieces, targets = packing.steps[0].target.shape
    return f"{rows} rows of {length} tokens, {pieces * targets} targets, {packing.padding_waste:.0%} padding"


def _placed(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def bytes_per_chip(tree: Any) -> float:
    """Bytes that a tree of abstract arrays takes on each chip; an array without a placement lies whole on every one."""

    def size(leaf: Any) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return float(sum(size(leaf) for leaf in jax.tree.leaves(tree)))
