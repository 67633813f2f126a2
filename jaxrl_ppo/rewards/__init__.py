"""Reward functions, the managers that call them, and the processes that run them. Imports nothing heavy."""

from jaxrl_ppo.rewards.manager import RewardManager
from jaxrl_ppo.rewards.results import RewardError

__all__ = ["RewardError", "RewardManager"]
