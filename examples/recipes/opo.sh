#!/usr/bin/env bash
# OPO: the group's length-weighted mean reward as the baseline, one optimizer step a batch, neither KL nor entropy term.
# The paper's training is exactly on-policy, which only the synchronous pipeline is. Hao et al. 2025, arXiv 2505.23585.
# Add your model and data: examples/recipes/opo.sh --config-name quickstart
exec python -m jaxrl_ppo.main \
  algorithm.adv_estimator=opo \
  'actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}' \
  actor_rollout_ref.actor.ppo_epochs=1 \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
