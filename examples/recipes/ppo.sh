#!/usr/bin/env bash
# PPO with a critic: advantages by GAE, values learned beside the policy, the critic alone in the first ten steps.
# Schulman et al. 2017, arXiv 1707.06347; GAE: Schulman et al. 2015, arXiv 1506.02438.
# Add your model and data: examples/recipes/ppo.sh --config-name quickstart
exec python -m jaxrl_ppo.main \
  algorithm.adv_estimator=gae \
  algorithm.gamma=1.0 \
  algorithm.lam=0.95 \
  critic.optim.lr=1e-5 \
  critic.cliprange_value=0.5 \
  trainer.critic_warmup=10 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
