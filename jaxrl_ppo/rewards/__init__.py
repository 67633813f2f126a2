"""Reward functions, the managers that call them, and the processes that run them."""
