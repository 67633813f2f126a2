"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) in Hugging Face's half-split layout."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.models.architecture import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each of the head_dim / 2 pairs, float32."""
    # float32 throughout, as transformers does: at long positions the last bit shows.
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1.0) / np.power(np.float32(rope.theta), exponent, dtype=np.float32)
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1's stretching: long wavelengths divided by `factor`, short ones kept, a ramp between."""
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    ramp = np.clip((rope.original_max_positions / wavelengths - low) / (high - low), 0.0, 1.0)
    return ((1 - ramp) * frequencies / rope.factor + ramp * frequencies).astype(np.float32)


def _yarn(frequencies: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): fast pairs kept, slow ones divided by `factor`, a ramp between.

    The ramp runs from the pair that makes `beta_fast` turns over the original positions to that of `beta_slow`.
    """

    def pair(turns: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return (frequencies * (1 - ramp) + frequencies / np.float32(rope.factor) * ramp).astype(np.float32)


def rope_angles(positions: jax.Array, rope: RopeConfig, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin [..., head_dim / 2] float32 at integer positions [...], times the rope's attention factor."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope, head_dim)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate each head's pairs (i, i + head_dim / 2): x [..., heads, head_dim], cos and sin [..., head_dim / 2]."""
    cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
