"""How large things are in a configured run: devices, replicas, sequences per update. Pure arithmetic on a Config."""

from __future__ import annotations

import math

from jaxrl_ppo.schema.config import Config

MESH_AXES = ("replica", "fsdp", "sequence", "tensor", "expert")


def trainer_devices(config: Config) -> int:
    """Devices of the trainer pool."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def rollout_devices(config: Config) -> int:
    """Devices of the rollout pool."""
    return config.actor_rollout_ref.rollout.nnodes * config.actor_rollout_ref.rollout.n_gpus_per_node


def takes_turns(config: Config) -> bool:
    """Whether rollout and trainer share the trainer's devices, each at its time."""
    policy, trainer = config.actor_rollout_ref, config.trainer
    return policy.hybrid_engine and trainer.mode == "sync" and policy.rollout.device in (None, trainer.device)


def replica_devices(config: Config) -> int:
    """Devices of one rollout replica."""
    rollout = config.actor_rollout_ref.rollout
    return (rollout.tensor_model_parallel_size or 1) * rollout.pipeline_model_parallel_size * rollout.data_parallel_size


def rollout_replicas(config: Config) -> int:
    """Engine replicas in the rollout pool."""
    return rollout_devices(config) // replica_devices(config)


def mesh_shape(config: Config) -> dict[str, int] | None:
    """Sizes of the trainer mesh's axes with -1 filled in; None when they do not multiply to the pool's devices."""
    return mesh_on(config, trainer_devices(config))


def mesh_on(config: Config, devices: int) -> dict[str, int] | None:
    """The same for the mesh on another number of devices: the critic's, in a pool of its own."""
    mesh = config.actor_rollout_ref.actor.mesh
    shape: dict[str, int] = {axis: getattr(mesh, axis) for axis in MESH_AXES}
    open_axes = [axis for axis, size in shape.items() if size == -1]
    fixed = math.prod(size for size in shape.values() if size != -1)
    if len(open_axes) > 1 or devices % fixed or (not open_axes and fixed != devices):
        return None
    return {axis: devices // fixed if size == -1 else size for axis, size in shape.items()}


def batch_devices(config: Config) -> int:
    """Groups of devices that each take rows of their own; the other axes split a row or a matrix. Needs a mesh."""
    shape = mesh_shape(config)
    if shape is None:
        raise ValueError("the mesh does not fit the trainer's devices")
    return shape["replica"] * shape["fsdp"] * shape["expert"]


def sequences_per_step(config: Config) -> int:
    """Responses generated for, and trained on in, one step."""
    return config.data.train_batch_size * config.actor_rollout_ref.rollout.n


def sequences_per_optimizer_step(config: Config) -> int:
    """Responses that one optimizer step sees."""
    return config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n


def optimizer_steps_per_step(config: Config) -> int:
    """Actor optimizer steps in one step."""
    actor = config.actor_rollout_ref.actor
    return config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs


def critic_devices(config: Config) -> int:
    """Devices of the critic's own pool; 0 where it shares the trainer's or there is none."""
    critic = config.critic
    return critic.nnodes * critic.n_gpus_per_node if critic.enable and critic.enable_resource_pool else 0


def reward_model_devices(config: Config) -> int:
    """Devices of the reward model's own pool; 0 where it shares the trainer's or there is none."""
    model = config.reward.reward_model
    return model.nnodes * model.n_gpus_per_node if model.enable and model.enable_resource_pool else 0


def judge_devices(config: Config) -> int:
    """Devices of one server of a generative judge."""
    judge = config.reward.reward_model.rollout
    return judge.tensor_model_parallel_size * judge.pipeline_model_parallel_size * judge.data_parallel_size


def judge_servers(config: Config) -> int:
    """Servers of a generative judge in the reward model's pool."""
    return reward_model_devices(config) // judge_devices(config)


def critic_steps_per_step(config: Config) -> int:
    """The critic's optimizer steps in one step."""
    return config.data.train_batch_size // config.critic.ppo_mini_batch_size * config.critic.ppo_epochs


def critic_tokens(config: Config) -> int | None:
    """Tokens of the critic's update on one device at a time, as `update_tokens`."""
    critic = config.critic
    by_tokens = config.actor_rollout_ref.actor.use_dynamic_bsz or not critic.ppo_micro_batch_size_per_gpu
    return critic.ppo_max_token_len_per_gpu if by_tokens else None


def update_tokens(config: Config) -> int | None:
    """Tokens of the actor's update on one device at a time, at most; None where a number of sequences is the limit."""
    actor = config.actor_rollout_ref.actor
    return actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz or not actor.ppo_micro_batch_size_per_gpu else None


def log_prob_tokens(config: Config) -> int | None:
    """The same of log-probs without gradients."""
    ref = config.actor_rollout_ref.ref
    by_tokens = ref.log_prob_use_dynamic_bsz or not ref.log_prob_micro_batch_size_per_gpu
    return ref.log_prob_max_token_len_per_gpu if by_tokens else None


def staleness(config: Config) -> int:
    """How many steps' updates lie, at most, between the weights that generate a sample and those it trains."""
    return {"sync": 0, "one_step_off": 1, "async": config.async_training.max_staleness}[config.trainer.mode]
