"""The invariant: loss and gradient do not depend on how a global mini-batch is cut into micro-batches or packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import assert_close, random_packing, settings, token_case

from jaxrl_ppo.algorithms.aggregation import LOSS_AGG_MODES, reject_in_loss, token_weights, weighted_sum
from jaxrl_ppo.algorithms.correction import correct_in_loss, correct_on_host
from jaxrl_ppo.algorithms.kl import kl_penalty
from jaxrl_ppo.algorithms.masked import packed_sequence_sum, padded_sequence_sum
from jaxrl_ppo.algorithms.policy_losses import PolicyLossInputs, compute_policy_loss, find_policy_loss
from jaxrl_ppo.algorithms.registry import POLICY_LOSSES

SAMPLES, TOKENS, FEATURES = 14, 9, 5
CONFIG = settings()
CASES = [("vanilla", mode) for mode in LOSS_AGG_MODES]
CASES += [(name, loss.aggregation or "token-mean") for name, loss in POLICY_LOSSES.items() if name != "vanilla"]


def mini_batch(name, mode):
    """A mini-batch with its weights and selection made once, and features that make log-probs depend on parameters."""
    case = token_case(11, SAMPLES, TOKENS)
    loss = find_policy_loss(name)
    if loss.select:
        case["selected"] = loss.select(case["old_log_probs"], case["advantages"], case["mask"], CONFIG, 7)
    case["weights"] = token_weights(mode, case["mask"], loss_scale_factor=32)
    case["features"] = np.random.default_rng(12).normal(0, 0.2, (SAMPLES, TOKENS, FEATURES)).astype(np.float32)
    return case


def loss_of(name, columns, parameters, sequence_sum):
    """Policy loss, KL and entropy-like term of some samples, all through the same weights."""
    columns = dict(columns)
    weights, features = columns.pop("weights"), columns.pop("features")
    columns["log_probs"] = columns["log_probs"] + features @ parameters
    inputs = PolicyLossInputs(**columns, sequence_sum=sequence_sum)
    token_loss, _ = compute_policy_loss(find_policy_loss(name), inputs, CONFIG)
    kl = kl_penalty(inputs.log_probs, inputs.rollout_log_probs, inputs.mask, "low_var_kl")
    return weighted_sum(token_loss + 0.1 * kl, weights)


def only(columns, chosen):
    """The columns with all rows but the chosen ones masked out: one shape for every micro-batch, compiled once."""
    keep = chosen.astype(np.float32)[:, None]
    return columns | {"mask": columns["mask"] * keep, "weights": columns["weights"] * keep}


def random_split(rng, samples):
    """Which micro-batch each sample goes to: 1 to 5 of them, of unequal size."""
    return rng.integers(0, rng.integers(1, 6), samples)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_twenty_random_splits_give_one_loss_and_gradient(name, mode):
    columns = mini_batch(name, mode)
    parameters = jnp.asarray(np.linspace(-1, 1, FEATURES), jnp.float32)
    compute = jax.jit(jax.value_and_grad(lambda p, c: loss_of(name, c, p, padded_sequence_sum)))
    value, gradient = compute(parameters, columns)
    assert np.linalg.norm(gradient) > 1e-3
    rng = np.random.default_rng(13)
    for _ in range(20):
        parts = random_split(rng, SAMPLES)
        results = [compute(parameters, only(columns, parts == part)) for part in np.unique(parts)]
        assert_close(sum(result[0] for result in results), value, 1e-5)
        assert_close(sum(result[1] for result in results), gradient, 1e-5)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_any_packing_gives_the_same_loss_and_gradient(name, mode):
    columns = mini_batch(name, mode)
    parameters = jnp.asarray(np.linspace(-1, 1, FEATURES), jnp.float32)
    expected = jax.jit(jax.value_and_grad(lambda p: loss_of(name, columns, p, padded_sequence_sum)))(parameters)
    packing = random_packing(np.random.default_rng(14), SAMPLES, TOKENS, per_row=4)
    packed = {column: packing.pack(value) for column, value in columns.items() if column != "features"}
    packed["features"] = np.stack([packing.pack(columns["features"][..., i]) for i in range(FEATURES)], axis=-1)
    sums = packed_sequence_sum(jnp.asarray(packing.sample_ids), packing.samples_per_row)
    actual = jax.jit(jax.value_and_grad(lambda p: loss_of(name, packed, p, sums)))(parameters)
    assert_close(actual[0], expected[0], 1e-5)
    assert_close(actual[1], expected[1], 1e-5)


RULES = [("token_k1", "0.8_1.25"), ("seq_mean_k3,seq_max_k2", "0.02,1.0"), ("seq_sum_k1", 1.5)]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_rejection_decided_inside_the_loss_equals_rejection_on_the_host(mode, rules):
    columns = mini_batch("vanilla", mode)
    case = {name: columns[name] for name in ("log_probs", "rollout_log_probs", "mask")}
    correction = settings(
        rollout_is=None, rollout_is_threshold=2.0, rollout_is_batch_normalize=False,
        rollout_rs=rules[0], rollout_rs_threshold=rules[1],
    )  # fmt: skip
    on_host = correct_on_host(**{"old_log_probs": case.pop("log_probs"), **case}, settings=correction)
    expected = token_weights(mode, on_host.mask, 32, response_mask=case["mask"])
    assert 0 < on_host.mask.sum() < case["mask"].sum()
    rng = np.random.default_rng(15)
    for _ in range(5):
        parts = random_split(rng, SAMPLES)
        weights, rejected = np.zeros_like(expected), 0.0
        for part in np.unique(parts):
            micro = {name: jnp.asarray(column) for name, column in only(columns, parts == part).items()}
            inside = correct_in_loss(
                micro["log_probs"], micro["rollout_log_probs"], micro["mask"], correction, padded_sequence_sum
            )
            part_weights, part_rejected = reject_in_loss(
                mode, micro["weights"], micro["mask"], inside.mask, padded_sequence_sum, SAMPLES
            )
            weights += np.asarray(part_weights)
            rejected += float(part_rejected)
        assert_close(weights / (1 - rejected), expected, 1e-5)
