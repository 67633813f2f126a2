"""The decoder layer as pure functions on arrays: what the trainer's scan and the engine's cached forward share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.rope import rotate

Params = Mapping[str, Any]  # nested: name -> array or Params

# (query, key, value) -> attention output, [R, S, H, hd]; decides what is seen, and may keep a cache.
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def rms_norm(x: jax.Array, params: Params, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * params["scale"].astype(x.dtype)


def linear(x: jax.Array, params: Params, contract: int = 1) -> jax.Array:
    """x times a kernel over x's last `contract` axes, plus a bias if there is one; computed in x's dtype."""
    kernel = params["kernel"].astype(x.dtype)
    inputs, outputs = kernel.shape[:contract], kernel.shape[contract:]
    # One flat matrix product: XLA:CPU leaves its fast path for anything else.
    flat = x.reshape(-1, _size(inputs)) @ kernel.reshape(_size(inputs), _size(outputs))
    out = flat.reshape(*x.shape[: x.ndim - contract], *outputs)
    return out + params["bias"].astype(x.dtype) if "bias" in params else out


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def attention_block(
    x: jax.Array, params: Params, config: DecoderConfig, cos: jax.Array, sin: jax.Array, attention: Attention
) -> jax.Array:
    """Project [R, S, D] to queries, keys and values, rotate, attend, project back."""
    query, key, value = (linear(x, params[name]) for name in ("q", "k", "v"))
    if config.qk_norm:
        query = rms_norm(query, params["q_norm"], config.norm_eps)
        key = rms_norm(key, params["k_norm"], config.norm_eps)
    out = attention(rotate(query, cos, sin), rotate(key, cos, sin), value)
    return linear(out, params["o"], contract=2)


def mlp_block(x: jax.Array, params: Params) -> jax.Array:
    """Gated feed-forward (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x))."""
    return linear(jax.nn.silu(linear(x, params["gate"])) * linear(x, params["up"]), params["down"])


def decoder_layer(
    x: jax.Array, params: Params, config: DecoderConfig, cos: jax.Array, sin: jax.Array, attention: Attention
) -> jax.Array:
    """One pre-norm layer on the residual stream x [R, S, D]."""
    normed = rms_norm(x, params["attention_norm"], config.norm_eps)
    x = x + attention_block(normed, params["attention"], config, cos, sin, attention)
    return x + mlp_block(rms_norm(x, params["mlp_norm"], config.norm_eps), params["mlp"])
