#!/usr/bin/env bash
# A run on two Cloud TPU slices: one trains, the other generates. One Ray worker per host, one Ray cluster over both.
#
#   TRAINER=my-v5p-32 ROLLOUT=my-v5e-8 ZONE=us-east5-a TRAINER_HOSTS=4 ROLLOUT_HOSTS=2 \
#     examples/launch/tpu_pod.sh data.train_files=/shared/train.parquet …
#
# It runs on your machine, with gcloud, and needs the package, the model and the run folder where every host finds them:
# a checkout at the same path on each host, and a bucket or file system mounted on all. A host drives its chips in one
# process, so trainer.nnodes is the number of hosts and n_gpus_per_node the chips of one (4; 8 on single-host v5e).
# Ray counts a host's chips as TPU and names its slice in a resource, by which each pool finds its own slice.
set -euo pipefail
: "${TRAINER:?the name of the trainer slice}" "${ROLLOUT:?the name of the rollout slice}" "${ZONE:?their zone}"
: "${TRAINER_HOSTS:?hosts of the trainer slice}" "${ROLLOUT_HOSTS:?hosts of the rollout slice}"
CHIPS=${CHIPS:-4}
PORT=${PORT:-6379}
FOLDER=${FOLDER:-\$HOME/jaxrl_ppo}

on() { # on SLICE WORKER COMMAND…
  gcloud compute tpus tpu-vm ssh "$1" --zone "$ZONE" --worker "$2" --command "cd $FOLDER && ${*:3}"
}

join() { # join SLICE FIRST_WORKER HOSTS: the slice's hosts as Ray nodes, each with a resource of the slice's name
  for ((worker = $2; worker < $3; worker++)); do
    on "$1" "$worker" "ray stop; ray start --address $HEAD:$PORT --resources='{\"$1\": 1}'" &
  done
}

HEAD=$(gcloud compute tpus tpu-vm describe "$TRAINER" --zone "$ZONE" --format 'value(networkEndpoints[0].ipAddress)')
on "$TRAINER" 0 "ray stop; ray start --head --port $PORT --resources='{\"$TRAINER\": 1}'"
join "$TRAINER" 1 "$TRAINER_HOSTS"
join "$ROLLOUT" 0 "$ROLLOUT_HOSTS"
wait

on "$TRAINER" 0 "RAY_ADDRESS=$HEAD:$PORT python -m jaxrl_ppo.main --config-name one_step_off_ppo_trainer \
  trainer.device=tpu trainer.node_resource=$TRAINER trainer.nnodes=$TRAINER_HOSTS trainer.n_gpus_per_node=$CHIPS \
  actor_rollout_ref.rollout.device=tpu actor_rollout_ref.rollout.node_resource=$ROLLOUT \
  rollout.nnodes=$ROLLOUT_HOSTS rollout.n_gpus_per_node=$CHIPS \
  actor_rollout_ref.rollout.tensor_model_parallel_size=$CHIPS $*"
