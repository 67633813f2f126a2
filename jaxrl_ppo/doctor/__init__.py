"""python -m jaxrl_ppo.doctor: what of this machine, this environment and a run's files fits, and what to do if not."""
