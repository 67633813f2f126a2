#!/usr/bin/env bash
# DAPO: prompts whose samples all score the same are replaced, a wider clip range upwards, a loss averaged over tokens,
# a penalty that grows over the last 4096 of 20480 tokens that a response may have. Yu et al. 2025, arXiv 2503.14476.
# Add your model and data: examples/recipes/dapo.sh --config-name quickstart data.max_response_length=48 \
#   reward.reward_kwargs.overlong_buffer_cfg.len=16 actor_rollout_ref.rollout.n=8
exec python -m jaxrl_ppo.main \
  algorithm.adv_estimator=grpo \
  algorithm.filter_groups.enable=True \
  algorithm.filter_groups.metric=score \
  algorithm.filter_groups.max_num_gen_batches=10 \
  actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528 \
  actor_rollout_ref.actor.clip_ratio_low=0.2 \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.use_kl_loss=False \
  data.max_response_length=20480 \
  reward.reward_manager.name=dapo \
  reward.reward_kwargs.overlong_buffer_cfg.enable=True \
  reward.reward_kwargs.overlong_buffer_cfg.len=4096 \
  reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
  'reward.reward_kwargs.max_resp_len=${data.max_response_length}' \
  "$@"
