"""The decoder as a Flax NNX module: stacked layers, scanned, over packed rows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_ppo.models.architecture import DecoderConfig, LayerKind
from jaxrl_ppo.models.attention import Rows
from jaxrl_ppo.models.experts import Load, balance_loss, routed_load
from jaxrl_ppo.models.kernels import KERNELS, row_attention
from jaxrl_ppo.models.layers import decoder_layer, embed, rms_norm
from jaxrl_ppo.models.parameters import flatten, nest, parameter_specs
from jaxrl_ppo.models.rope import rope_angles
from jaxrl_ppo.sharding.layout import Layout

# What the backward pass of a layer keeps: everything, only its input, or the results of its projections.
REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Decoder(nnx.Module):
    """A causal decoder up to its final norm, and its head: that of a language model, or one that gives numbers.

    With `config.head` "lm", `head()` is the kernel that makes logits of hidden states; with "value" or "sequence",
    `values` gives a number for every token.
    `param_dtype` is what parameters are stored in, `dtype` what the forward pass computes in (norms and softmax
    always in float32). `remat` is "none", "full" or "dots", `attention` a kernel of `kernels.py`. On a mesh, `layout`
    says where activations lie; None leaves that to the compiler. Every nnx.Param carries `logical_axes`, a name per
    axis.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: Any = jnp.float32,
        dtype: Any = jnp.float32,
        remat: str = "none",
        attention: str = "xla",
        layout: Layout | None = None,
    ):
        if attention not in KERNELS:
            raise ValueError(f"attention {attention!r} is not known; use {', '.join(KERNELS)}")
        if remat != "none" and remat not in REMAT_POLICIES:
            raise ValueError(f"remat {remat!r} is not known; use none, {', '.join(REMAT_POLICIES)}")
        self.config = config
        self.dtype = dtype
        self.remat = remat
        self.attention = attention
        self.layout = layout
        tree = nest(
            {
                path: nnx.Param(spec.initializer(rngs.params(), spec.shape, param_dtype), logical_axes=spec.axes)
                for path, spec in parameter_specs(config).items()
            }
        )
        self.embed = _modules(tree["embed"])
        self.layers = _modules(tree["layers"])
        self.final_norm = _modules(tree["final_norm"])
        if "lm_head" in tree:
            self.lm_head = _modules(tree["lm_head"])
        if "score" in tree:
            self.score = _modules(tree["score"])

    def hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        branch_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Hidden states after the final norm, [R, S, D] in `dtype`, of packed rows; all arguments int [R, S].

        Token i sees token j iff j <= i, their segments are equal and not 0, and, with `branch_ids`, j's branch is 0
        (the shared prompt) or i's own.
        """
        return self.hidden_and_balance(tokens, positions, segment_ids, branch_ids)[0]

    def hidden_and_balance(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        branch_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """As `hidden`, and the load-balance loss of the rows' tokens, a float32 scalar; None without experts."""
        config = self.config
        params = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        row_attend = row_attention(
            self.attention,
            Rows(positions, segment_ids, branch_ids),
            scale=config.query_scale,
            soft_cap=config.attention_softcap,
            windows={kind.window for kind in config.kinds},
            layout=self.layout,
        )
        angles = {kind.rope: rope_angles(positions, kind.rope, config.head_dim) for kind in config.kinds}

        def layer(x: jax.Array, layer_params: dict[str, Any], kind: LayerKind) -> tuple[jax.Array, Load | None]:
            attention = functools.partial(row_attend, window=kind.window)
            layer_params = self._computing(layer_params)
            x, routing = decoder_layer(x, layer_params, config, *angles[kind.rope], attention, self.layout)
            return self._stream(x), None if routing is None else routed_load(routing, segment_ids != 0)

        if self.remat != "none":
            policy = REMAT_POLICIES[self.remat]
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=False, static_argnums=2)

        def period(x: jax.Array, stacked: dict[str, Any], kinds: Sequence[LayerKind]) -> tuple[jax.Array, list[Any]]:
            loads = []
            for i, kind in enumerate(kinds):
                one = stacked if len(kinds) == 1 else jax.tree.map(operator.itemgetter(i), stacked)
                x, load = layer(x, one, kind)
                loads.append(load)
            return x, loads

        x = self._stream(embed(tokens, params["embed"], config, self.dtype, self.layout))
        loads: list[Load] = []
        for stacked, kinds in _periods(params["layers"], config):
            x, more = jax.lax.scan(functools.partial(period, kinds=kinds), x, stacked)
            loads += more
        balance = None
        if config.num_experts:
            balance = balance_loss(jax.tree.map(lambda *parts: sum(part.sum(0) for part in parts), *loads))
        return rms_norm(x, params["final_norm"], config), balance

    def _stream(self, x: jax.Array) -> jax.Array:
        """The residual stream [R, S, D] where it belongs."""
        return x if self.layout is None else self.layout.constrain(x, "rows", "length", "features")

    def _computing(self, layer_params: dict[str, Any]) -> dict[str, Any]:
        """One layer's parameters in `dtype`, each still where it lies: they are gathered after the cast, not before."""
        if self.layout is None:
            return layer_params
        axes = {path: spec.axes[1:] for path, spec in parameter_specs(self.config).items()}
        return nest(
            {
                path: self.layout.constrain(leaf.astype(self.dtype), *axes[f"layers.{path}"])
                for path, leaf in flatten(layer_params)
            }
        )

    def head(self) -> jax.Array:
        """The [D, V] kernel that turns hidden states into logits, in `dtype`; tied models share the embedding."""
        if self.config.tie_embeddings:
            return self.embed["embedding"][...].astype(self.dtype).T
        return self.lm_head["kernel"][...].astype(self.dtype)

    def values(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        branch_ids: jax.Array | None = None,
    ) -> jax.Array:
        """The head's number for every token of packed rows, float32 [R, S]; arguments as of `hidden`.

        A critic's value of the state after that token; of a reward model, the score of the sequence that ends there.
        """
        return self.project_values(self.hidden(tokens, positions, segment_ids, branch_ids))

    def project_values(self, hidden: jax.Array) -> jax.Array:
        """The head's number for hidden states [..., D]: float32 [...], computed in float32."""
        kernel = self.score["kernel"][...].astype(jnp.float32)
        values = jnp.einsum("...d,dl->...l", hidden.astype(jnp.float32), kernel)[..., 0]
        return values + self.score["bias"][0].astype(jnp.float32) if self.config.head_bias else values


def _periods(layers: Any, config: DecoderConfig) -> Iterator[tuple[Any, tuple[LayerKind, ...]]]:
    """Stacked layers [L, ...] cut into whole periods [n, p, ...] and the rest [1, r, ...], each with its kinds.

    Where a period is a single layer they stay [n, ...]: for an axis of size 1, XLA copies all weights in every call.
    """

    def cut(start: int, stop: int, period: int) -> Any:
        some = jax.tree.map(lambda leaf: leaf[start:stop], layers)
        return some if period == 1 else jax.tree.map(lambda leaf: leaf.reshape(-1, period, *leaf.shape[1:]), some)

    kinds = config.kinds
    left = config.num_layers % len(kinds)
    if left < config.num_layers:
        yield cut(0, config.num_layers - left, len(kinds)), kinds
    if left:
        yield cut(config.num_layers - left, config.num_layers, left), kinds[:left]


def _modules(branch: dict[str, Any]) -> nnx.Dict:
    return nnx.Dict({key: _modules(value) if isinstance(value, dict) else value for key, value in branch.items()})
