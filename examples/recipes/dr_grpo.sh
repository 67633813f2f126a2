#!/usr/bin/env bash
# Dr.GRPO: GRPO without its two biases, the division by the group's standard deviation and that by each response's
# length. Liu et al. 2025, arXiv 2503.20783.
# Add your model and data: examples/recipes/dr_grpo.sh --config-name quickstart
exec python -m jaxrl_ppo.main \
  algorithm.adv_estimator=grpo \
  algorithm.norm_adv_by_std_in_grpo=False \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
