"""What a configuration means for the trainer's programs on a mesh, before any weight is read: kernel, remat, limits."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.sharding import Mesh

import device
from jaxrl_ppo.algorithms.policy_losses import configured_policy_loss
from jaxrl_ppo.models.config import load_decoder_config
from jaxrl_ppo.models.kernels import row_multiple, takes_branches
from jaxrl_ppo.models.lora import make_lora, read_lora
from jaxrl_ppo.sharding.layout import Layout
from jaxrl_ppo.sharding.memory import check_host_memory
from jaxrl_ppo.training.model_programs import decayed_parameters
from jaxrl_ppo.training.optimizer import make_optimizer
from jaxrl_ppo.training.packing import PackingLimits
from jaxrl_ppo.training.programs import PolicyPrograms
from jaxrl_ppo.training.value_programs import ValuePrograms

if TYPE_CHECKING:
    from jaxrl_ppo.models.architecture import DecoderConfig
    from jaxrl_ppo.schema.config import (
        ActorConfig,
        ActorRolloutRefConfig,
        AlgorithmConfig,
        CriticConfig,
        ModelPathConfig,
        RewardModelConfig,
        RolloutCorrectionConfig,
    )

DTYPES = {"fp32": jnp.float32, "float32": jnp.float32, "bf16": jnp.bfloat16, "bfloat16": jnp.bfloat16}


def policy_model(config: ModelPathConfig, folder: str | Path) -> DecoderConfig:
    """The policy of a model folder, with the LoRA adapter that `actor_rollout_ref.model` asks for.

    An adapter to start from decides its rank, scale and projections itself. Raises ModelFolderError or ValueError.
    """
    model = load_decoder_config(folder)
    if config.lora_adapter_path:
        return dataclasses.replace(model, lora=read_lora(config.lora_adapter_path, model))
    if not config.lora_rank:
        return model
    lora = make_lora(model, config.lora_rank, config.lora_alpha, config.target_modules, config.exclude_modules)
    return dataclasses.replace(model, lora=lora)


def policy_programs(
    config: ActorRolloutRefConfig, algorithm: AlgorithmConfig, model: DecoderConfig, mesh: Mesh, total_steps: int
) -> PolicyPrograms:
    """The policy's compiled programs. `total_steps` is the run's number of optimizer steps.

    Raises ValueError, UserCodeError or ShardingError for what the configuration names wrongly.
    """
    actor, rollout = config.actor, config.rollout
    _check_offload(config, mesh)
    longest = rollout.prompt_length + rollout.response_length
    if longest > model.max_positions and any(kind.rope.kind == "dynamic" for kind in model.kinds):
        raise ValueError(
            f"rollout.prompt_length {rollout.prompt_length} + response_length {rollout.response_length} exceed the "
            f"model's {model.max_positions} positions, where its rope type dynamic makes every token depend on how "
            "long its sequence will be: log-probs would have no one value. Shorten them, or use rope type yarn"
        )
    return PolicyPrograms(
        model,
        actor,
        configured_policy_loss(actor.policy_loss.loss_mode, algorithm.rollout_correction),
        make_optimizer(actor.optim, total_steps, decayed_parameters(model), "actor_rollout_ref.actor.optim"),
        Layout(mesh),
        correction=_correction_in_loss(algorithm),
        dtype=DTYPES[actor.fsdp_config.dtype],
        remat=_remat(config.model.enable_gradient_checkpointing, mesh),
        attention=attention_kernel(actor, model, mesh),
    )


def critic_programs(
    critic: CriticConfig, policy: ActorRolloutRefConfig, model: DecoderConfig, mesh: Mesh, total_steps: int
) -> ValuePrograms:
    """The critic's compiled programs; data types, rematerialisation, attention and offload are the actor's.

    `total_steps` is the run's number of the critic's optimizer steps. Raises ValueError or ShardingError.
    """
    return ValuePrograms(
        model,
        critic,
        make_optimizer(critic.optim, total_steps, decayed_parameters(model), "critic.optim"),
        Layout(mesh),
        dtype=DTYPES[policy.actor.fsdp_config.dtype],
        remat=_remat(policy.model.enable_gradient_checkpointing, mesh),
        attention=attention_kernel(policy.actor, model, mesh),
        offload_state=policy.actor.fsdp_config.optimizer_offload,
    )


def attention_kernel(actor: ActorConfig, model: DecoderConfig, mesh: Mesh) -> str:
    """The kernel of `models/kernels.py` that the mesh's devices have for this computation type and prefix sharing."""
    kernel = device.capabilities(_kind(mesh)).attention
    if actor.prefix_sharing == "true" and not takes_branches(kernel):
        return "xla"
    if kernel == "cudnn" and DTYPES[actor.fsdp_config.dtype] == jnp.float32:
        return "xla"  # cuDNN's flash attention has 16-bit types only
    if kernel == "cudnn" and model.attention_softcap is not None:
        return "xla"  # nor has it a soft cap
    return kernel


def update_limits(config: ActorRolloutRefConfig, model: DecoderConfig, layout: Layout) -> PackingLimits:
    """How the micro-steps of an update may look."""
    actor = config.actor
    by_sequences = None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    return _limits(actor, model, layout, by_sequences, actor.ppo_max_token_len_per_gpu, key)


def log_prob_limits(config: ActorRolloutRefConfig, model: DecoderConfig, layout: Layout) -> PackingLimits:
    """How those of log-probs without gradients may look."""
    ref = config.ref
    by_sequences = None if ref.log_prob_use_dynamic_bsz else ref.log_prob_micro_batch_size_per_gpu
    key = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
    return _limits(config.actor, model, layout, by_sequences, ref.log_prob_max_token_len_per_gpu, key)


def critic_limits(
    critic: CriticConfig, policy: ActorRolloutRefConfig, model: DecoderConfig, layout: Layout
) -> PackingLimits:
    """How those of the critic may look."""
    by_sequences = None if policy.actor.use_dynamic_bsz else critic.ppo_micro_batch_size_per_gpu
    key = "critic.ppo_max_token_len_per_gpu"
    return _limits(policy.actor, model, layout, by_sequences, critic.ppo_max_token_len_per_gpu, key)


def reward_model_limits(
    settings: RewardModelConfig, actor: ActorConfig, model: DecoderConfig, layout: Layout
) -> PackingLimits:
    """How those of a reward model may look."""
    key = "reward.reward_model.forward_max_token_len_per_gpu"
    return _limits(actor, model, layout, None, settings.forward_max_token_len_per_gpu, key)


def _limits(
    actor: ActorConfig, model: DecoderConfig, layout: Layout, sequences: int | None, tokens: int, key: str
) -> PackingLimits:
    kernel = attention_kernel(actor, model, layout.mesh)
    # A piece of rows lies on all devices of the sequence axis, each with its own share of every row's tokens.
    shares = layout.pieces("length")
    return PackingLimits(
        groups=layout.pieces("rows"),
        tokens=None if sequences else tokens * shares,
        tokens_key=key if shares == 1 else f"actor.mesh.sequence x {key}",
        sequences=sequences,
        share_prefix=actor.prefix_sharing != "false" and takes_branches(kernel),
        attention_cost=_attention_cost(model),
        multiple=math.lcm(row_multiple(kernel), shares),
    )


def _check_offload(config: ActorRolloutRefConfig, mesh: Mesh) -> None:
    asked = {
        "actor.fsdp_config.param_offload": config.actor.fsdp_config.param_offload,
        "actor.fsdp_config.optimizer_offload": config.actor.fsdp_config.optimizer_offload,
        "ref.fsdp_config.param_offload": config.ref.fsdp_config.param_offload,
    }
    for key, wanted in asked.items():
        if wanted:
            check_host_memory(mesh, f"actor_rollout_ref.{key}")


def _kind(mesh: Mesh) -> str:
    first = mesh.devices.flat[0]
    if first.platform != "gpu":
        return first.platform
    return "rocm" if "rocm" in first.client.platform_version.lower() else "cuda"


def _remat(enabled: bool, mesh: Mesh) -> str:
    if not enabled:
        return "none"
    # On CPU memory traffic is dear: keeping the projections' results is faster than keeping all or nothing.
    return "dots" if _kind(mesh) == "cpu" else "full"


def _correction_in_loss(algorithm: AlgorithmConfig) -> RolloutCorrectionConfig | None:
    """Rollout correction is the loss's own business in bypass mode, where no old log-probs are known before it."""
    settings = algorithm.rollout_correction
    active = settings.rollout_is is not None or settings.rollout_rs is not None
    return settings if settings.bypass_mode and active else None


def _attention_cost(model: DecoderConfig) -> float:
    """Cost of one token's attention per token of row length, relative to the matrix products of its layer.

    Half of a row's scores are computed, and masked; they are small products with a softmax between them, so that a
    floating-point operation there costs about four times one in the large products (measured on CPU).
    """
    attention = 2 * 2 * model.num_heads * model.head_dim
    projections = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    experts = model.experts_per_token or 1
    return attention / (projections + 3 * model.hidden_size * model.intermediate_size * experts)
