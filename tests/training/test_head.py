"""Chunked log-probs and entropy against the plain formulas, and the memory that chunks save."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_ppo.training.head import gather_sources, token_log_probs

PIECES, SLOTS, WIDTH, VOCABULARY = 2, 13, 8, 50


def plain(hidden, kernel, target, temperature, cap=None):
    logits = jnp.einsum("gtd,dv->gtv", hidden, kernel)
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    log_probs = jax.nn.log_softmax(logits / temperature, axis=-1)
    chosen = jnp.take_along_axis(log_probs, target[..., None], -1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


@pytest.fixture(scope="module")
def inputs():
    keys = jax.random.split(jax.random.key(0), 5)
    return (
        jax.random.normal(keys[0], (PIECES, SLOTS, WIDTH)),
        jax.random.normal(keys[1], (WIDTH, VOCABULARY)),
        jax.random.randint(keys[2], (PIECES, SLOTS), 0, VOCABULARY),
        jnp.float32(0.7),
        jax.random.normal(keys[3], (PIECES, SLOTS)),
        jax.random.normal(keys[4], (PIECES, SLOTS)),
    )


@pytest.mark.parametrize(("chunk", "cap"), [(1, None), (4, None), (4, 2.0), (13, None), (1000, None)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_equal_the_plain_formula(inputs, chunk, cap, with_entropy):
    hidden, kernel, target, temperature, log_prob_weight, entropy_weight = inputs
    weight = entropy_weight if with_entropy else 0

    def total(outputs):
        log_probs, entropy = outputs
        # Not linear, so that the cotangents differ from token to token.
        return jnp.sum(jnp.exp(log_probs) * log_prob_weight) + (jnp.sum(entropy**2 * weight) if with_entropy else 0)

    ours = lambda h, k: total(token_log_probs(h, k, target, temperature, chunk, with_entropy, cap))  # noqa: E731
    theirs = lambda h, k: total(plain(h, k, target, temperature, cap))  # noqa: E731
    expected, expected_grads = jax.value_and_grad(theirs, (0, 1))(hidden, kernel)
    value, grads = jax.jit(jax.value_and_grad(ours, (0, 1)))(hidden, kernel)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for grad, wanted in zip(grads, expected_grads):
        np.testing.assert_allclose(grad, wanted, atol=1e-5 * np.abs(wanted).max())
    log_probs, entropy = token_log_probs(hidden, kernel, target, temperature, chunk, with_entropy, cap)
    wanted_log_probs, wanted_entropy = plain(hidden, kernel, target, temperature, cap)
    np.testing.assert_allclose(log_probs, wanted_log_probs, rtol=1e-5, atol=1e-5)
    if with_entropy:
        np.testing.assert_allclose(entropy, wanted_entropy, rtol=1e-5, atol=1e-5)
    else:
        assert entropy is None


def test_bfloat16_projections_keep_float32_log_probs(inputs):
    hidden, kernel, target, temperature, *_ = inputs
    low = [x.astype(jnp.bfloat16) for x in (hidden, kernel)]
    log_probs, _ = token_log_probs(*low, target, temperature, 4, False)
    assert log_probs.dtype == jnp.float32
    exact, _ = plain(*(x.astype(jnp.float32) for x in low), target, temperature)
    np.testing.assert_allclose(log_probs, exact, rtol=1e-5, atol=1e-5)


def test_sources_may_repeat_and_come_in_any_order():
    hidden = jnp.arange(2 * 2 * 3 * 1, dtype=jnp.float32).reshape(4, 3, 1)  # two pieces of two rows of three
    source = jnp.array([[5, 0, 0], [2, 3, 5]])
    np.testing.assert_array_equal(gather_sources(hidden, source)[..., 0], [[5, 0, 0], [8, 9, 11]])
    pull = jax.grad(lambda h: (gather_sources(h, source)[..., 0] * jnp.array([[1.0, 2, 4], [8, 16, 32]])).sum())(hidden)
    np.testing.assert_array_equal(pull.reshape(-1), [6, 0, 0, 0, 0, 1, 0, 0, 8, 16, 0, 32])


def test_memory_grows_with_the_chunk_and_not_with_tokens_times_vocabulary():
    tokens, width, vocabulary = 4096, 16, 30_000

    def temporaries(function):
        hidden = jax.ShapeDtypeStruct((1, tokens, width), jnp.float32)
        kernel = jax.ShapeDtypeStruct((width, vocabulary), jnp.float32)
        target = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        program = jax.jit(jax.grad(lambda h, k, t: function(h, k, t).sum(), (0, 1)))
        return program.lower(hidden, kernel, target).compile().memory_analysis().temp_size_in_bytes

    def chunked(chunk):
        return temporaries(lambda h, k, t: token_log_probs(h, k, t, jnp.float32(1), chunk, False)[0])

    logits = 4 * tokens * vocabulary
    assert temporaries(lambda h, k, t: plain(h, k, t, 1.0)[0]) > logits
    assert chunked(256) < 0.2 * logits
    assert chunked(64) < 0.5 * chunked(256)
