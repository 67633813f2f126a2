"""Values that follow from others: keys left at null get the value they stand for."""

from __future__ import annotations

from jaxrl_ppo.schema.config import Config


def fill_in(config: Config) -> None:
    """Replace, in place, each null that stands for another key's value, and copy the rollout pool to its place."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    if config.rollout.nnodes is not None:
        rollout.nnodes = config.rollout.nnodes
    if config.rollout.n_gpus_per_node is not None:
        rollout.n_gpus_per_node = config.rollout.n_gpus_per_node
    if config.actor_rollout_ref.hybrid_engine and rollout.nnodes == 0:  # verl's way to say: on the trainer's nodes
        rollout.nnodes, rollout.n_gpus_per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if rollout.device is None:
        rollout.device = config.trainer.device
    if rollout.tensor_model_parallel_size is None:
        rollout.tensor_model_parallel_size = 1
    if rollout.max_model_len is None:
        rollout.max_model_len = rollout.prompt_length + rollout.response_length
    judge = config.reward.reward_model.rollout
    if judge.max_model_len is None:
        judge.max_model_len = judge.prompt_length + judge.response_length
    if actor.loss_scale_factor is None:
        actor.loss_scale_factor = float(rollout.response_length)
    if config.critic.enable is None:
        config.critic.enable = config.algorithm.adv_estimator == "gae"
    if config.critic.model.path is None:
        config.critic.model.path = config.actor_rollout_ref.model.path
    if config.data.gen_batch_size is None:
        config.data.gen_batch_size = config.data.train_batch_size
    if config.data.seed is None:
        config.data.seed = 1
    if config.reward.reward_kwargs.max_resp_len is None:
        config.reward.reward_kwargs.max_resp_len = config.data.max_response_length
