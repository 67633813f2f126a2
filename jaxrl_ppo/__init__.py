"""PPO and its relatives for language models on JAX, after verl's two PPO programs."""

__version__ = "0.1.0"
