"""Loss weights per token: each mode's value from its formula, and independence of how a mini-batch is cut up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import assert_close, random_mask

from jaxrl_ppo.algorithms.aggregation import LOSS_AGG_MODES, token_weights, weighted_sum


def oracle(mode: str, loss: np.ndarray, mask: np.ndarray, factor: float) -> float:
    """The aggregated loss in float64, sequence by sequence."""
    total, sequences = 0.0, len(loss)
    for row, kept in zip(loss.astype(np.float64), mask > 0):
        tokens = row[kept]
        if mode == "seq-mean-token-mean":
            total += tokens.mean() if len(tokens) else 0.0
        else:
            total += tokens.sum()
    divisor = {
        "token-mean": mask.sum(),
        "token-sum": 1,
        "seq-mean-token-sum": sequences,
        "seq-mean-token-mean": sequences,
        "seq-mean-token-sum-norm": sequences * factor,
    }
    return total / divisor[mode]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_each_mode_is_its_formula(mode):
    rng = np.random.default_rng(1)
    mask = random_mask(rng, 13, 17)
    loss = rng.normal(size=mask.shape).astype(np.float32)
    weights = token_weights(mode, mask, loss_scale_factor=64)
    assert weights.dtype == np.float32
    assert_close(weighted_sum(loss, weights), oracle(mode, loss, mask, 64), 1e-5)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_an_empty_mask_weighs_nothing(mode):
    assert not token_weights(mode, np.zeros((3, 4)), loss_scale_factor=4).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_leaks_from_outside_the_mask(bad):
    mask = random_mask(np.random.default_rng(2), 6, 5)
    weights = jnp.asarray(token_weights("token-mean", mask))
    loss = np.where(mask > 0, 1.0, bad).astype(np.float32)
    value, gradient = jax.value_and_grad(weighted_sum)(jnp.asarray(loss), weights)
    assert_close(value, 1.0, 1e-6)
    assert_close(gradient, weights, 1e-6)


def test_rejected_sequences_leave_the_count_and_empty_responses_do_not():
    response_mask = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]], np.float32)
    mask = response_mask.copy()
    mask[1] = 0  # rejected whole
    mask[0, 1] = 0  # one token rejected
    weights = token_weights("seq-mean-token-mean", mask, response_mask=response_mask)
    expected = np.zeros_like(mask)
    expected[0, 0] = expected[3, 0] = 1 / 3
    assert_close(weights, expected, 1e-6)
    weights = token_weights("token-mean", mask, response_mask=response_mask)
    assert_close(weights.sum(axis=1), [1 / 2, 0, 0, 1 / 2], 1e-6)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="loss_agg_mode is 'mean', not one of token-mean"):
        token_weights("mean", np.ones((1, 1)))
    with pytest.raises(ValueError, match="needs loss_scale_factor"):
        token_weights("seq-mean-token-sum-norm", np.ones((1, 1)))
