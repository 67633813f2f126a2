#!/usr/bin/env bash
# RLOO: each sample against the mean of its prompt's others, with the KL penalty in the reward.
# Ahmadian et al. 2024, arXiv 2402.14740.
# Add your model and data: examples/recipes/rloo.sh --config-name quickstart
exec python -m jaxrl_ppo.main \
  algorithm.adv_estimator=rloo \
  actor_rollout_ref.rollout.n=8 \
  algorithm.use_kl_in_reward=True \
  algorithm.kl_penalty=kl \
  algorithm.kl_ctrl.kl_coef=0.001 \
  actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
