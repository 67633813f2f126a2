#!/usr/bin/env bash
# Long sums from reasoning-gym: the quickstart's model calls a calculator, and two rewards with weights count, the right
# answer and a tool that answered. Without a download, on two CPU cores. Further arguments override: bash
# examples/reasoning/chain_sum_tools.sh trainer.total_training_steps=5
set -e
data=${DATA:-runs/data/chain_sum}
test -f "$data/test.parquet" || python examples/data_preprocess/reasoning_tasks.py --task chain_sum \
  --train_size 500 --test_size 32 --tool_examples 3 --local_save_dir "$data"
exec python -m jaxrl_ppo.main --config-name quickstart \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.train_batch_size=4 \
  data.max_prompt_length=640 \
  data.max_response_length=128 \
  actor_rollout_ref.actor.ppo_mini_batch_size=4 \
  actor_rollout_ref.rollout.max_num_seqs=32 \
  actor_rollout_ref.rollout.multi_turn.enable=true \
  actor_rollout_ref.rollout.multi_turn.tool_config_path=examples/tools/calculator.py \
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2 \
  actor_rollout_ref.rollout.agent.num_workers=1 \
  '+reward.functions.right={weight: 1.0}' \
  '+reward.functions.tool={path: examples/rewards/uses_tool.py, weight: 0.2}' \
  trainer.total_training_steps=12 \
  trainer.test_freq=12 \
  trainer.save_freq=-1 \
  trainer.experiment_name=chain_sum_tools \
  trainer.default_local_dir=runs/chain_sum_tools \
  "$@"
