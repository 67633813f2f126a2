#!/usr/bin/env bash
# CISPO: the clipped importance ratio is a weight, so no token loses its gradient. No lower bound on the ratio, as in
# the paper: MiniMax 2025, arXiv 2506.13585.
# Add your model and data: examples/recipes/cispo.sh --config-name quickstart
exec python -m jaxrl_ppo.main \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.policy_loss.loss_mode=cispo \
  actor_rollout_ref.actor.clip_ratio_low=1.0 \
  actor_rollout_ref.actor.clip_ratio_high=0.2 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
