#!/usr/bin/env bash
# GSPO: one importance ratio per sequence, clipped in a narrow range. Zheng et al. 2025, arXiv 2507.18071.
# Add your model and data: examples/recipes/gspo.sh --config-name quickstart
exec python -m jaxrl_ppo.main \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
  actor_rollout_ref.actor.clip_ratio_low=3e-4 \
  actor_rollout_ref.actor.clip_ratio_high=4e-4 \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
