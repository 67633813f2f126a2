"""Compiles a run's programs for devices that need not be here, and says what they cost: python -m jaxrl_ppo.plan."""
