#!/usr/bin/env bash
# REINFORCE++: no critic and no groups; returns whitened over the whole batch, KL penalty per token in the reward.
# Hu et al. 2025, arXiv 2501.03262.
# Add your model and data: examples/recipes/reinforce_plus_plus.sh --config-name quickstart
exec python -m jaxrl_ppo.main \
  algorithm.adv_estimator=reinforce_plus_plus \
  algorithm.use_kl_in_reward=True \
  algorithm.kl_penalty=kl \
  algorithm.kl_ctrl.kl_coef=0.001 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
