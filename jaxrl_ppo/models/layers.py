"""The decoder layer as pure functions on arrays: what the trainer's scan and the engine's cached forward share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.experts import Routing, expert_block
from jaxrl_ppo.models.lookup import spread_lookup
from jaxrl_ppo.models.rope import rotate
from jaxrl_ppo.sharding.layout import Layout

Params = Mapping[str, Any]  # nested: name -> array or Params

# (query, key, value) -> attention output, [R, S, H, hd]; decides what is seen, and may keep a cache.
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """x bounded to (-cap, cap): cap * tanh(x / cap), as in Gemma 2 (arXiv:2408.00118); x itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def embed(
    tokens: jax.Array, params: Params, config: DecoderConfig, dtype: Any, layout: Layout | None = None
) -> jax.Array:
    """Embeddings of tokens [...] in `dtype`, scaled as the model wants them: [..., D].

    On a mesh, with `layout`, of packed rows [R, S].
    """
    table = params["embedding"]
    x = table[tokens].astype(dtype) if layout is None else spread_lookup(tokens, table, dtype, layout)
    return x if config.embedding_scale == 1 else x * jnp.asarray(config.embedding_scale, dtype)


def rms_norm(x: jax.Array, params: Params, config: DecoderConfig) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + config.norm_eps)
    if config.norm_plus_one:  # in float32 to the end, as transformers does for these models
        return (scaled * (1 + params["scale"].astype(jnp.float32))).astype(x.dtype)
    return scaled.astype(x.dtype) * params["scale"].astype(x.dtype)


def linear(x: jax.Array, params: Params, contract: int = 1, *, adapter_scale: float = 0.0) -> jax.Array:
    """x times a kernel over x's last `contract` axes, plus a bias if there is one; computed in x's dtype.

    A LoRA adapter, if there is one, adds `adapter_scale` times its product.
    """
    kernel = params["kernel"].astype(x.dtype)
    inputs, outputs = kernel.shape[:contract], kernel.shape[contract:]
    # One flat matrix product: XLA:CPU leaves its fast path for anything else.
    rows = x.reshape(-1, _size(inputs))
    flat = rows @ kernel.reshape(_size(inputs), _size(outputs))
    if "lora_a" in params:
        first, second = params["lora_a"].astype(x.dtype), params["lora_b"].astype(x.dtype)
        inner = rows @ first.reshape(_size(inputs), -1)
        flat += adapter_scale * (inner @ second.reshape(-1, _size(outputs)))
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
    project = functools.partial(linear, adapter_scale=config.adapter_scale)
    query, key, value = (project(x, params[name]) for name in ("q", "k", "v"))
    if config.qk_norm:
        query = rms_norm(query, params["q_norm"], config)
        key = rms_norm(key, params["k_norm"], config)
    out = attention(rotate(query, cos, sin), rotate(key, cos, sin), value)
    return project(out, params["o"], contract=2)


def mlp_block(x: jax.Array, params: Params, config: DecoderConfig) -> jax.Array:
    """Gated feed-forward (Shazeer 2020, arXiv:2002.05202): down(activation(gate(x)) * up(x))."""
    project = functools.partial(linear, adapter_scale=config.adapter_scale)
    gate = _ACTIVATIONS[config.activation](project(x, params["gate"]))
    return project(gate * project(x, params["up"]), params["down"])


def decoder_layer(
    x: jax.Array,
    params: Params,
    config: DecoderConfig,
    cos: jax.Array,
    sin: jax.Array,
    attention: Attention,
    layout: Layout | None = None,
) -> tuple[jax.Array, Routing | None]:
    """One pre-norm layer on the residual stream x [R, S, D]; also which experts each token went to, if there are any.

    `layout` says how experts lie on a mesh; None: whole on one device.
    """
    normed = rms_norm(x, params["attention_norm"], config)
    out = attention_block(normed, params["attention"], config, cos, sin, attention)
    x = x + (rms_norm(out, params["attention_post_norm"], config) if config.post_norms else out)
    normed = rms_norm(x, params["mlp_norm"], config)
    routing = None
    if config.num_experts:
        out, routing = expert_block(normed, params["mlp"], config, _ACTIVATIONS[config.activation], layout)
    else:
        out = mlp_block(normed, params["mlp"], config)
    return x + (rms_norm(out, params["mlp_post_norm"], config) if config.post_norms else out), routing
