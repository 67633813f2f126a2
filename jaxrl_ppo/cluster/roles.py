"""Which worker class serves which role, and on which pool."""

from __future__ import annotations

from typing import Any

import device
from jaxrl_ppo.cluster.judge_worker import JudgeWorker
from jaxrl_ppo.cluster.pools import PoolSpec, ResourcePoolManager, Role
from jaxrl_ppo.cluster.rollout_worker import RolloutWorker
from jaxrl_ppo.cluster.trainer_worker import TrainerWorker
from jaxrl_ppo.schema import sizes
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.rules_reward_model import judge_served

TRAINER_POOL, CRITIC_POOL, REWARD_POOL, ROLLOUT_POOL = "trainer_pool", "critic_pool", "reward_pool", "rollout_pool"


def create_role_worker_mapping(config: Config) -> dict[Role, Any]:
    """The Ray actor class of every role that this configuration uses.

    The reference policy is there when a KL term needs it; it lives in the actor's process, and so do the critic and
    the reward model unless they have a pool of their own.
    """
    mapping = {Role.Actor: TrainerWorker, Role.Rollout: RolloutWorker}
    if config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss:
        mapping[Role.RefPolicy] = TrainerWorker
    if config.critic.enable:
        mapping[Role.Critic] = TrainerWorker
    if config.reward.reward_model.enable:
        mapping[Role.RewardModel] = JudgeWorker if judge_served(config) else TrainerWorker
    return mapping


def create_resource_pool_manager(config: Config, mapping: dict[Role, Any]) -> ResourcePoolManager:
    """The pools of this configuration: one process per trainer host, one per host of a critic's or a reward model's own
    pool, one per rollout replica and per server of a judge.

    On CPU a "node" is a process with `n_gpus_per_node` virtual devices, and several may share a host. Raises
    DeviceError where trainer and rollout are to take turns on devices that cannot be shared.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    turns = sizes.takes_turns(config)
    if turns:
        device.check_shareable(trainer.device, "actor_rollout_ref.hybrid_engine=true")
    pools = {
        TRAINER_POOL: PoolSpec(
            TRAINER_POOL,
            processes=trainer.nnodes,
            devices=trainer.n_gpus_per_node,
            resource=device.capabilities(trainer.device).ray_resource,
            keys="trainer.nnodes, trainer.n_gpus_per_node, trainer.device" + ", shared with the rollout" * turns,
            node_resource=trainer.node_resource,
        ),
        ROLLOUT_POOL: PoolSpec(
            ROLLOUT_POOL,
            processes=sizes.rollout_replicas(config),
            devices=sizes.replica_devices(config),
            resource=device.capabilities(rollout.device or trainer.device).ray_resource,
            keys="actor_rollout_ref.rollout.nnodes, .n_gpus_per_node, .tensor_model_parallel_size, .device",
            node_resource=rollout.node_resource,
            within=TRAINER_POOL if turns else None,
        ),
    }
    where = {Role.Rollout: ROLLOUT_POOL}
    if Role.Critic in mapping and config.critic.enable_resource_pool:
        where[Role.Critic] = CRITIC_POOL
        pools[CRITIC_POOL] = PoolSpec(
            CRITIC_POOL,
            processes=config.critic.nnodes,
            devices=config.critic.n_gpus_per_node,
            resource=device.capabilities(trainer.device).ray_resource,
            keys="critic.nnodes, critic.n_gpus_per_node",
        )
    model = config.reward.reward_model
    if Role.RewardModel in mapping and model.enable_resource_pool:
        where[Role.RewardModel] = REWARD_POOL
        judge = judge_served(config)  # on devices such as vLLM runs on, of the rollout's kind
        pools[REWARD_POOL] = PoolSpec(
            REWARD_POOL,
            processes=sizes.judge_servers(config) if judge else model.nnodes,
            devices=sizes.judge_devices(config) if judge else model.n_gpus_per_node,
            resource=device.capabilities((judge and rollout.device) or trainer.device).ray_resource,
            keys="reward.reward_model.nnodes, .n_gpus_per_node",
        )
    return ResourcePoolManager(pools, {role: where.get(role, TRAINER_POOL) for role in mapping})
