"""The device side of the JAX engine: caches and compiled programs of one batch of slots. Decides nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.cache import EMPTY, LayerCache, Sharing, decode, prefill
from jaxrl_ppo.models.layers import Params, softcap
from jaxrl_ppo.rollout.jax_sampling import Array, Draw, sample
from jaxrl_ppo.rollout.jax_shapes import power_of_two

SCORE_CHUNK = 128  # tokens whose logits are held at a time when scoring


class Shape(NamedTuple):
    """Sizes of a batch: slots, columns of their ring, rows for prompts, a prompt's columns, slots that share a row."""

    slots: int
    columns: int
    rows: int
    prompt_columns: int
    members: int


class Prompts(NamedTuple):
    """What prefilling leaves: hidden state of each prompt's last token [P, D], each layer's keys and values."""

    hidden: jax.Array
    layers: list[tuple[jax.Array, jax.Array]]  # [P, K, S, hd]


class Decoded(NamedTuple):
    """Tokens and log-probs [n, B] of `steps` <= n steps, on the host. A row after its slot's end is meaningless."""

    tokens: np.ndarray
    log_probs: np.ndarray
    steps: int


class SlotInputs(NamedTuple):
    """What the host knows of each slot, arrays [B]."""

    tokens: Array  # the last one
    positions: Array  # its position
    drawn: Array  # tokens so far
    remaining: Array  # how many more may come; 0: an empty slot
    stops: Array  # bool: an end token ends it
    draw: Draw


class Programs:
    """The compiled programs of one model. `compiled` are the shapes so far: each took a compilation."""

    def __init__(self, config: DecoderConfig, dtype: Any, steps: int):
        """`steps` is the most decode steps of one dispatch."""
        self.config, self.dtype, self.steps = config, dtype, steps
        self.compiled: set[tuple[Any, ...]] = set()
        self._prefill = jax.jit(functools.partial(_prefill, config=config, dtype=dtype))
        self._score = jax.jit(functools.partial(_score, config=config, dtype=dtype))
        self.first_program = jax.jit(functools.partial(_first, config=config), static_argnames="truncate")
        self.decode_program = jax.jit(
            functools.partial(_decode, config=config, dtype=dtype, length=steps),
            static_argnames="truncate",
            donate_argnames=("cache", "own_positions"),
        )

    def prefill(self, params: Params, tokens: np.ndarray, lengths: np.ndarray) -> Prompts:
        """Run prompts [P, S], right-padded."""
        self.compiled.add(("prefill", tokens.shape))
        return self._prefill(tokens, lengths, params)

    def score(self, params: Params, tokens: np.ndarray) -> np.ndarray:
        """Log-probs [S - 1] of tokens [S] after the first, at temperature 1."""
        self.compiled.add(("score", tokens.shape))
        return np.asarray(self._score(tokens, params))


class SlotBatch:
    """The caches of up to `shape.slots` requests in generation."""

    def __init__(self, programs: Programs, shape: Shape):
        config = programs.config
        self._programs, self.shape = programs, shape
        self.column = 0  # the ring's next

        def zeros(rows: int, columns: int) -> jax.Array:
            return jnp.zeros((rows, config.num_kv_heads, columns, config.head_dim), programs.dtype)

        prompt, own = (shape.rows, shape.prompt_columns), (shape.slots, shape.columns)
        self._cache = [
            LayerCache(zeros(*prompt), zeros(*prompt), zeros(*own), zeros(*own)) for _ in range(config.num_layers)
        ]
        self._hidden = jnp.zeros((shape.rows, config.hidden_size), programs.dtype)  # of each prompt's last token
        self._own_positions = jnp.full((shape.slots, shape.columns), EMPTY, jnp.int32)

    def put_prompts(self, prompts: Prompts, sources: Sequence[int], rows: Sequence[int]) -> None:
        """Copy prefilled prompts `sources` into prompt rows `rows`."""
        size = power_of_two(len(rows))
        source, target = _padded(sources, size, 0), _padded(rows, size, self.shape.rows)
        self._hidden = _put_hidden(self._hidden, prompts.hidden, source, target)
        self._cache = [
            layer._replace(
                prompt_keys=_put_rows(layer.prompt_keys, keys, source, target),
                prompt_values=_put_rows(layer.prompt_values, values, source, target),
            )
            for layer, (keys, values) in zip(self._cache, prompts.layers)
        ]

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Forget what the ring holds of `slots`: another request begins there."""
        rows = _padded(slots, self.shape.slots, self.shape.slots)
        self._own_positions = _clear_rows(self._own_positions, rows)

    def first_tokens(
        self, params: Params, rows: np.ndarray, drawn: np.ndarray, draw: Draw, truncate: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Each request's first token and log-prob [R], given its prompt row and how many tokens it has already."""
        programs = self._programs
        programs.compiled.add(("first", self._hidden.shape, rows.shape, truncate))
        tokens, log_probs = programs.first_program(self._hidden, rows, drawn, draw, params, truncate=truncate)
        return np.asarray(tokens), np.asarray(log_probs)

    def reshaped(self, shape: Shape, slots: Sequence[int], rows: Sequence[int]) -> SlotBatch:
        """The same requests in a batch of another shape: old slots and prompt rows, in their new order.

        A ring that grows is turned so that its oldest column is the first and the new columns follow its newest: then
        no column of a request is overwritten before the request has written `shape.columns` of them.
        """
        old, new = self.shape, SlotBatch.__new__(SlotBatch)
        grows = shape.columns != old.columns
        new._programs, new.shape = self._programs, shape
        new.column = old.columns if grows else self.column
        shift = self.column if grows else 0
        old_slots, old_rows = _padded(slots, shape.slots, old.slots), _padded(rows, shape.rows, old.rows)
        rows_move = shape[2:4] != old[2:4] or list(rows) != list(range(len(rows)))

        def move(layer: LayerCache) -> LayerCache:
            prompt, own = layer[:2], layer[2:]
            if rows_move:
                prompt = tuple(_take_rows(x, old_rows, 0, shape.prompt_columns) for x in prompt)
            return LayerCache(*prompt, *(_take_rows(x, old_slots, shift, shape.columns) for x in own))

        new._cache = [move(layer) for layer in self._cache]
        new._hidden = _take_hidden(self._hidden, old_rows)
        new._own_positions = _take_positions(self._own_positions, old_slots, shift, shape.columns)
        return new

    def decode(
        self, params: Params, inputs: SlotInputs, sharing: Sharing, stop_ids: np.ndarray, truncate: bool
    ) -> Decoded:
        """Up to `Programs.steps` tokens of every slot; fewer once all have ended."""
        programs = self._programs
        programs.compiled.add(("decode", self.shape, truncate))
        tokens, log_probs, steps, self._own_positions, self._cache = programs.decode_program(
            inputs,
            sharing,
            stop_ids,
            np.int32(self.column),
            self._own_positions,
            self._cache,
            params,
            truncate=truncate,
        )
        done = int(steps)
        self.column = (self.column + done) % self.shape.columns
        return Decoded(np.asarray(tokens)[:done], np.asarray(log_probs)[:done], done)


def _padded(rows: Sequence[int], size: int, nothing: int) -> np.ndarray:
    padded = np.full(size, nothing, np.int32)
    padded[: len(rows)] = rows
    return padded


@functools.partial(jax.jit, donate_argnums=0)
def _put_rows(target: jax.Array, source: jax.Array, sources: jax.Array, rows: jax.Array) -> jax.Array:
    columns = min(source.shape[2], target.shape[2])
    return target.at[rows, :, :columns].set(source[sources, :, :columns], mode="drop")


@functools.partial(jax.jit, donate_argnums=0)
def _put_hidden(target: jax.Array, source: jax.Array, sources: jax.Array, rows: jax.Array) -> jax.Array:
    return target.at[rows].set(source[sources], mode="drop")


@functools.partial(jax.jit, donate_argnums=0)
def _clear_rows(positions: jax.Array, rows: jax.Array) -> jax.Array:
    return positions.at[rows].set(EMPTY, mode="drop")


@functools.partial(jax.jit, static_argnums=3)
def _take_rows(source: jax.Array, rows: jax.Array, shift: jax.Array, columns: int) -> jax.Array:
    taken = source.at[rows].get(mode="fill", fill_value=0)
    if columns > source.shape[2]:
        taken = jnp.roll(taken, -shift, axis=2)
    return jnp.pad(taken, ((0, 0), (0, 0), (0, columns - source.shape[2]), (0, 0)))


@functools.partial(jax.jit, static_argnums=3)
def _take_positions(source: jax.Array, rows: jax.Array, shift: jax.Array, columns: int) -> jax.Array:
    taken = source.at[rows].get(mode="fill", fill_value=EMPTY)
    taken = jnp.roll(taken, -shift, axis=1)
    return jnp.pad(taken, ((0, 0), (0, columns - source.shape[1])), constant_values=EMPTY)


@jax.jit
def _take_hidden(source: jax.Array, rows: jax.Array) -> jax.Array:
    return source.at[rows].get(mode="fill", fill_value=0)


def _logits(hidden: jax.Array, params: Params, config: DecoderConfig) -> jax.Array:
    """Float32 logits [..., V] of hidden states [..., D]."""
    if config.tie_embeddings:
        contract = (((hidden.ndim - 1,), (1,)), ((), ()))
        kernel = params["embed"]["embedding"]
        logits = jax.lax.dot_general(hidden, kernel, contract, preferred_element_type=jnp.float32)
    else:
        logits = jnp.matmul(hidden, params["lm_head"]["kernel"], preferred_element_type=jnp.float32)
    return softcap(logits, config.logit_softcap)


def _prefill(tokens: jax.Array, lengths: jax.Array, params: Params, *, config: DecoderConfig, dtype: Any) -> Prompts:
    hidden, layers = prefill(tokens, lengths, params, config, dtype)
    return Prompts(jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], 1)[:, 0], layers)


def _score(tokens: jax.Array, params: Params, *, config: DecoderConfig, dtype: Any) -> jax.Array:
    hidden, _ = prefill(tokens[None], jnp.array([tokens.shape[0]]), params, config, dtype)
    pad = -(tokens.shape[0] - 1) % SCORE_CHUNK
    hidden = jnp.pad(hidden[0, :-1], ((0, pad), (0, 0))).reshape(-1, SCORE_CHUNK, hidden.shape[-1])
    targets = jnp.pad(tokens[1:], (0, pad)).reshape(-1, SCORE_CHUNK)

    def log_probs(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = _logits(chunk[0], params, config)
        chosen = jnp.take_along_axis(logits, chunk[1][:, None], 1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    return jax.lax.map(log_probs, (hidden, targets)).reshape(-1)[: tokens.shape[0] - 1]


def _first(
    hidden: jax.Array,
    rows: jax.Array,
    drawn: jax.Array,
    draw: Draw,
    params: Params,
    *,
    config: DecoderConfig,
    truncate: bool,
) -> tuple[jax.Array, jax.Array]:
    # Requests with the same prompt differ only in what is drawn.
    return sample(_logits(hidden, params, config)[rows], draw, drawn, truncate=truncate)


def _decode(
    inputs: SlotInputs,
    sharing: Sharing,
    stop_ids: jax.Array,
    column: jax.Array,
    own_positions: jax.Array,
    cache: list[LayerCache],
    params: Params,
    *,
    config: DecoderConfig,
    dtype: Any,
    length: int,
    truncate: bool,
) -> tuple[Any, ...]:
    slots, columns = own_positions.shape

    def running(state: tuple[Any, ...]) -> jax.Array:
        step, _, alive, *_ = state
        return (step < length) & alive.any()

    def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, tokens, alive, out_tokens, out_log_probs, own_positions, cache = state
        hidden, own_positions, cache = decode(
            tokens,
            inputs.positions + step,
            (column + step) % columns,
            own_positions,
            cache,
            sharing,
            params,
            config,
            dtype,
        )
        logits = _logits(hidden, params, config)
        tokens, log_probs = sample(logits, inputs.draw, inputs.drawn + step, truncate=truncate)
        ended = inputs.stops & (tokens[:, None] == stop_ids).any(1)
        alive = alive & ~ended & (step + 1 < inputs.remaining)
        out_tokens, out_log_probs = out_tokens.at[step].set(tokens), out_log_probs.at[step].set(log_probs)
        return step + 1, tokens, alive, out_tokens, out_log_probs, own_positions, cache

    state = (
        jnp.int32(0),
        jnp.asarray(inputs.tokens),
        jnp.asarray(inputs.remaining) > 0,
        jnp.zeros((length, slots), jnp.int32),
        jnp.zeros((length, slots), jnp.float32),
        own_positions,
        cache,
    )
    steps, _, _, out_tokens, out_log_probs, own_positions, cache = jax.lax.while_loop(running, body, state)
    return out_tokens, out_log_probs, steps, own_positions, cache
