"""The mathematics: advantages, policy losses, KL, aggregation, rollout correction. Pure functions of arrays."""
