"""The fullest batch a configuration allows, packed as a run packs it, and the abstract arguments of each program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.schema.records import Batch, Prompt
from jaxrl_ppo.sharding.memory import on_device
from jaxrl_ppo.training.minibatches import make_mini_batch, make_value_mini_batch
from jaxrl_ppo.training.packing import Packing, pack
from jaxrl_ppo.training.setup import (
    DTYPES,
    critic_limits,
    critic_programs,
    log_prob_limits,
    policy_programs,
    update_limits,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxrl_ppo.models.architecture import DecoderConfig
    from jaxrl_ppo.schema.config import Config
    from jaxrl_ppo.training.model_programs import ModelPrograms
    from jaxrl_ppo.training.programs import PolicyPrograms


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One program to compile: a jitted function, its abstract arguments, and what else lies in memory meanwhile.

    `resident` names what the program does not take but the run keeps on every chip, in bytes. `runs` is how often the
    program runs in one step.
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    """A trained model's state, abstract: "actor" or "critic". `params_rest`: in host memory while not in use."""

    name: str
    programs: ModelPrograms
    params: Any
    state: Any
    params_rest: bool

    @property
    def kept(self) -> dict[str, float]:
        """What the run keeps of it on every chip all the time, those arrays that rest in host memory not counted."""
        kept = {f"{self.name} optimizer state": bytes_per_chip(self.state)}
        return kept if self.params_rest else kept | {f"{self.name} weights": bytes_per_chip(self.params)}

    def training(
        self, packing: Packing, columns: dict[str, np.ndarray], scalars: tuple[Any, ...], steps: int, kept: dict
    ) -> Iterator[Work]:
        """The gradient of a micro-step, summed up where there are several, and the optimizer step."""
        programs, weights = self.programs, f"{self.name} weights"
        arrays, grads = _abstract(programs, packing, columns), programs.trained(self.params)
        if len(packing.steps) == 1:
            function, arguments = programs.first_gradient, (self.params, arrays, *scalars)
        else:
            sums = jax.eval_shape(programs.first_gradient, self.params, arrays, *scalars)[1]
            function, arguments = programs.next_gradient, (self.params, grads, sums, arrays, *scalars)
        resident = _without(kept, weights)
        runs = steps * len(packing.steps)
        yield Work(f"{self.name} gradient", function, arguments, resident, runs, _shape(packing))
        resident = _without(kept, weights, f"{self.name} optimizer state")
        arguments = (self.params, self.state, grads)
        yield Work(f"{self.name} optimizer", programs.apply, arguments, resident, steps, "parameters")


def make_workload(
    config: Config, model: DecoderConfig, critic: DecoderConfig | None, mesh: Mesh, *, needs_reference: bool
) -> Workload:
    """The programs of one step of `config` on `mesh`, whose devices need not be here; nothing is allocated on them.

    Every prompt and response is as long as it may be: that is the most memory and the most work a step can take.
    `critic` is its model where the run has one, on the same mesh. Raises PackingError when such a sample does not fit
    into the token limits, ValueError, UserCodeError or ShardingError for what the configuration names wrongly.
    """
    roles, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    batches = config.data.train_batch_size // actor.ppo_mini_batch_size
    steps = batches * actor.ppo_epochs
    programs = policy_programs(roles, config.algorithm, model, mesh, total_steps=steps)
    policy = _model("actor", programs, config)
    kept = policy.kept
    if needs_reference and model.lora is None and not roles.ref.fsdp_config.param_offload:
        kept["reference policy"] = bytes_per_chip(programs.abstract_params(programs.dtype))
    values = None
    if critic is not None:
        value_programs = critic_programs(config.critic, roles, critic, mesh, total_steps=steps)
        values = _model("critic", value_programs, config)
        kept |= values.kept
    batch = _fullest(config, actor.ppo_mini_batch_size)
    samples, length = np.arange(len(batch.group)), roles.rollout.response_length
    temperature = jax.ShapeDtypeStruct((), jnp.float32)

    mini_batch = make_mini_batch(
        batch, samples, actor, programs.loss, response_length=length, seed=0, rejecting=programs.rejecting
    )
    packing = pack(batch, samples, update_limits(roles, model, programs.layout))
    works = list(policy.training(packing, programs.columns(mini_batch), (temperature,), steps, kept))
    packing = pack(batch, samples, log_prob_limits(roles, model, programs.layout))
    arguments = (policy.params, _abstract(programs, packing, {}), temperature)
    runs = batches * len(packing.steps) * (2 if needs_reference else 1)
    resident = _without(kept, "actor weights")
    works.append(Work("log-probs", programs.log_probs, arguments, resident, runs, _shape(packing)))
    if critic is not None and values is not None:
        settings, scale = config.critic, actor.loss_scale_factor or length
        mini_batch = make_value_mini_batch(batch, samples, settings.loss_agg_mode, scale)
        packing = pack(batch, samples, critic_limits(settings, roles, critic, programs.layout))
        steps_of_critic = batches * settings.ppo_epochs
        works += values.training(packing, mini_batch.columns, (), steps_of_critic, kept)
        inputs = (values.params, _abstract(values.programs, packing, {}))
        resident, runs = _without(kept, "critic weights"), batches * len(packing.steps)
        works.append(Work("values", value_programs.values, inputs, resident, runs, _shape(packing)))
    lengths = np.full(config.data.train_batch_size * roles.rollout.n, config.data.max_prompt_length + length)
    return Workload(works, programs, lengths, steps)


def _model(name: str, programs: ModelPrograms, config: Config) -> _Model:
    params = programs.abstract_params(DTYPES[config.actor_rollout_ref.actor.fsdp_config.model_dtype])
    state = jax.eval_shape(programs.init_state, params)
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        programs.state_shardings,
    )
    return _Model(name, programs, params, placed, config.actor_rollout_ref.actor.fsdp_config.param_offload)


def _without(kept: dict[str, float], *names: str) -> dict[str, float]:
    return {name: size for name, size in kept.items() if name not in names}


def _fullest(config: Config, prompts: int) -> Batch:
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
        ref_log_probs=ones if config.actor_rollout_ref.actor.use_kl_loss else None,
        values=ones,
        advantages=ones,
        returns=ones,
        importance_weights=ones if correction.rollout_is and not correction.bypass_mode else None,
    )


def _abstract(
    programs: ModelPrograms, packing: Packing, columns: dict[str, np.ndarray]
) -> dict[str, jax.ShapeDtypeStruct]:
    placements = programs.placements(packing.steps[0], columns)
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        for name, (array, sharding) in placements.items()
    }


def _shape(packing: Packing) -> str:
    rows, length = packing.steps[0].tokens.shape
    pieces, targets = packing.steps[0].target.shape
    return f"{rows} rows of {length} tokens, {pieces * targets} targets, {packing.padding_waste:.0%} padding"


def bytes_per_chip(tree: Any) -> float:
    """Bytes that a tree of abstract arrays takes of each chip's memory, whole ones where they have no placement."""

    def size(leaf: Any) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return float(sum(size(leaf) for leaf in jax.tree.leaves(tree) if on_device(leaf.sharding)))
