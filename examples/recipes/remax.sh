#!/usr/bin/env bash
# ReMax: the score of the prompt's greedy response, generated with the batch, as the baseline; KL penalty in the reward.
# Li et al. 2023, arXiv 2310.10505.
# Add your model and data: examples/recipes/remax.sh --config-name quickstart
exec python -m jaxrl_ppo.main \
  algorithm.adv_estimator=remax \
  algorithm.use_kl_in_reward=True \
  algorithm.kl_penalty=kl \
  algorithm.kl_ctrl.kl_coef=0.001 \
  actor_rollout_ref.actor.use_kl_loss=False \
  "$@"
