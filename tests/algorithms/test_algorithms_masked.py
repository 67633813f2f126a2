"""Masked primitives against float64 numpy, and sums per sample in both layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import assert_close, oracle_gradient, poison, random_mask, random_packing

from jaxrl_ppo.algorithms.masked import (
    masked_mean,
    masked_sum,
    masked_variance,
    packed_sequence_sum,
    padded_sequence_sum,
    whiten,
)


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    mask = random_mask(rng, 8, 11)
    return (rng.normal(3.0, 2.0, mask.shape)).astype(np.float32), mask


def whitened(x, mask):
    chosen = x[mask > 0]
    result = np.zeros(x.shape)
    result[mask > 0] = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    return result


ORACLES = {
    masked_sum: lambda x, mask: np.where(mask > 0, x, 0).sum(),
    masked_mean: lambda x, mask: x[mask > 0].mean(),
    masked_variance: lambda x, mask: x[mask > 0].var(ddof=1),
    whiten: whitened,
}


@pytest.mark.parametrize("function", ORACLES, ids=lambda f: f.__name__)
def test_value_and_gradient_are_the_formula_s(function, case):
    x, mask = case
    oracle = ORACLES[function]
    assert_close(function(x, mask), oracle(x.astype(np.float64), mask), 1e-5)
    weights = np.linspace(0.5, 1.5, x.size).reshape(x.shape)
    gradient = jax.grad(lambda x: jnp.sum(function(x, mask) * weights))(jnp.asarray(x))
    assert_close(gradient, oracle_gradient(lambda x: oracle(x, mask) * weights, x), 1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("function", ORACLES, ids=lambda f: f.__name__)
def test_nothing_leaks_from_outside_the_mask(function, bad, case):
    x, mask = case
    clean, dirty = (
        jax.value_and_grad(lambda x: jnp.sum(function(x, mask) ** 2))(jnp.asarray(value))
        for value in (np.where(mask > 0, x, 0), poison(x, mask, bad))
    )
    np.testing.assert_array_equal(dirty[0], clean[0])
    np.testing.assert_array_equal(dirty[1], clean[1])
    assert not np.any(np.asarray(dirty[1])[mask == 0])


def test_whitening_a_constant_gives_zeros_not_noise():
    mask = np.ones((40, 50), np.float32)
    np.testing.assert_array_equal(whiten(np.full(mask.shape, 0.3, np.float32), mask), 0)


def test_a_variance_of_one_token_is_an_error():
    with pytest.raises(ValueError, match="at least two tokens in the mask, not 1"):
        masked_variance(np.ones((1, 2)), np.array([[1, 0]]))


def test_sequence_sums_agree_in_both_layouts(case):
    x, mask = case
    x = np.where(mask > 0, x, 0)
    packing = random_packing(np.random.default_rng(1), *x.shape, per_row=3)
    padded = np.asarray(padded_sequence_sum(jnp.asarray(x)))
    packed = packed_sequence_sum(jnp.asarray(packing.sample_ids), packing.samples_per_row)(jnp.asarray(packing.pack(x)))
    assert_close(padded, np.broadcast_to(x.sum(axis=1, keepdims=True), x.shape), 1e-5)
    assert_close(packing.unpack(np.asarray(packed)), padded, 1e-5)
