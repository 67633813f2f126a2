"""The sharded training step: packed batches, log-probs, the update, checkpoints."""
