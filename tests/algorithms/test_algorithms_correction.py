"""Rollout correction: weights, rejection rules and their settings, against float64 numpy; and in the loss itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import assert_close, poison, random_packing, settings, token_case

from jaxrl_ppo.algorithms.correction import check_settings, correct_in_loss, correct_on_host
from jaxrl_ppo.algorithms.diagnostics import rollout_metrics, weight_metrics
from jaxrl_ppo.algorithms.masked import packed_sequence_sum, padded_sequence_sum
from jaxrl_ppo.algorithms.policy_losses import PolicyLossInputs, compute_policy_loss, find_policy_loss
from jaxrl_ppo.algorithms.rejection import RULES


def correction(**overrides):
    """The section's defaults but for `overrides`."""
    values = {
        "rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False,
        "rollout_rs": None, "rollout_rs_threshold": None, "bypass_mode": False,
    }  # fmt: skip
    return settings(**(values | overrides))


def case_of(seed):
    case = token_case(seed)
    return case["old_log_probs"], case["rollout_log_probs"], case["mask"]


def weights_oracle(old, rollout, mask, config):
    result = np.zeros(mask.shape)
    low, high = {2.0: (None, 2.0), "0.8_1.3": (0.8, 1.3), 0.9: (None, 0.9)}[config.rollout_is_threshold]
    for i, row in enumerate(mask > 0):
        delta = np.clip(old[i, row].astype(np.float64) - rollout[i, row], -20, 20)
        w = np.exp(delta if config.rollout_is == "token" else np.full(delta.shape, delta.sum()))
        result[i, row] = np.minimum(w, high) if low is None else np.where((w >= low) & (w <= high), w, 0)
    if config.rollout_is_batch_normalize and config.rollout_is == "token":
        result /= result[mask > 0].mean()
    elif config.rollout_is_batch_normalize:
        result /= np.mean([w[row > 0][0] for w, row in zip(result, mask) if row.any()])
    return result


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("threshold", [2.0, 0.9, "0.8_1.3"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_the_formula_s(level, threshold, normalise):
    config = correction(rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=normalise)
    case = case_of(0)
    result = correct_on_host(*case, config)
    expected = weights_oracle(*case, config)
    assert result.importance_weights.dtype == np.float32
    assert expected.max() > 0
    assert_close(result.importance_weights, expected, 1e-5)
    np.testing.assert_array_equal(result.mask, case[2])
    for bad in (np.nan, np.inf, -np.inf):
        dirty = correct_on_host(poison(case[0], case[2], bad), poison(case[1], case[2], bad), case[2], config)
        np.testing.assert_array_equal(dirty.importance_weights, result.importance_weights)


def kept_oracle(old, rollout, mask, name, lower, upper):
    """Whether each token passes the rule; lower and upper bound the ratio for k1 and the divergence for others."""
    level, _, kind = name.rpartition("_")
    result = np.zeros(mask.shape, bool)
    for i, row in enumerate(mask > 0):
        delta = np.clip(old[i, row].astype(np.float64) - rollout[i, row], -20, 20)
        statistic = {"k1": -delta, "k2": delta**2 / 2, "k3": np.exp(delta) - 1 - delta}[kind]
        if level != "token" and len(delta):
            statistic = {"seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max}[level](statistic)
        result[i, row] = (
            (np.exp(statistic) >= lower) & (np.exp(statistic) <= upper) if kind == "k1" else statistic <= upper
        )
    return result


THRESHOLDS = {"k1": ("0.9_1.2", 0.9, 1.2), "k2": (0.01, 0.0, 0.01), "k3": ("0.01", 0.0, 0.01)}


@pytest.mark.parametrize("name", RULES)
def test_each_rejection_rule_is_its_formula(name):
    case = case_of(1)
    threshold, lower, upper = THRESHOLDS[name[-2:]]
    config = correction(rollout_rs=name, rollout_rs_threshold=threshold)
    result = correct_on_host(*case, config)
    expected = kept_oracle(*case, name, lower, upper)
    assert 0 < expected.sum() < case[2].sum()
    np.testing.assert_array_equal(result.mask, expected)
    masked = result.metrics["rollout_corr/rollout_rs_masked_fraction"]
    np.testing.assert_array_equal(masked, (case[2] > 0) & ~expected)
    for bad in (np.nan, np.inf, -np.inf):
        dirty = correct_on_host(poison(case[0], case[2], bad), poison(case[1], case[2], bad), case[2], config)
        np.testing.assert_array_equal(dirty.mask, result.mask)


def test_a_comma_means_and_and_one_k1_number_bounds_both_sides():
    case = case_of(2)
    result = correct_on_host(*case, correction(rollout_rs="token_k1, seq_mean_k3", rollout_rs_threshold="1.2,0.02"))
    both = kept_oracle(*case, "token_k1", 1 / 1.2, 1.2) & kept_oracle(*case, "seq_mean_k3", 0, 0.02)
    assert both.sum() > 0
    np.testing.assert_array_equal(result.mask, both)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_bypass_mode_decides_the_same_inside_the_loss_in_both_layouts(level):
    old, rollout, mask = case_of(3)
    config = correction(rollout_is=level, rollout_rs="token_k1,seq_max_k3", rollout_rs_threshold="1.5,0.3")
    on_host = correct_on_host(old, rollout, mask, config)
    packing = random_packing(np.random.default_rng(4), *mask.shape, per_row=4)
    packed = [jnp.asarray(packing.pack(x)) for x in (old, rollout, mask)]
    sums = packed_sequence_sum(jnp.asarray(packing.sample_ids), packing.samples_per_row)
    padded = [jnp.asarray(x) for x in (old, rollout, mask)]
    inside = jax.jit(lambda *x: vars(correct_in_loss(*x, config, padded_sequence_sum)))(*padded)
    inside_packed = jax.jit(lambda *x: vars(correct_in_loss(*x, config, sums)))(*packed)
    for name in ("mask", "importance_weights", "old_log_probs"):
        expected = on_host.__dict__.get(name, old)
        assert_close(inside[name], expected, 1e-5)
        assert_close(packing.unpack(np.asarray(inside_packed[name])), expected, 1e-5)


def test_bypass_weights_correct_once():
    # One token, twice as likely now as in the rollout: the policy gradient is -2 A, not -4 A, nor that of the weight.
    mask = jnp.ones((1, 1))
    rollout = jnp.full((1, 1), np.log(0.2), jnp.float32)

    def loss(log_probs, config):
        inside = correct_in_loss(log_probs, rollout, mask, config, padded_sequence_sum)
        inputs = PolicyLossInputs(
            log_probs=log_probs, old_log_probs=inside.old_log_probs, advantages=jnp.full((1, 1), 3.0),
            mask=inside.mask, importance_weights=inside.importance_weights,
        )  # fmt: skip
        return compute_policy_loss(find_policy_loss("vanilla"), inputs, settings(clip_ratio_high=9.0))[0].sum()

    for config in (
        correction(rollout_is="token", rollout_is_threshold=5.0, bypass_mode=True),
        correction(bypass_mode=True),
    ):
        gradient = jax.grad(loss)(jnp.full((1, 1), np.log(0.4), jnp.float32), config)
        assert_close(gradient, [[-6.0]], 1e-5)
    truncated = correction(rollout_is="token", rollout_is_threshold=1.5, bypass_mode=True)
    assert_close(jax.grad(loss)(jnp.full((1, 1), np.log(0.4), jnp.float32), truncated), [[-4.5]], 1e-5)


def test_what_bypass_mode_decides_carries_no_gradient():
    old, rollout, mask = (jnp.asarray(x) for x in case_of(6))
    config = correction(rollout_is="sequence", rollout_is_threshold=100.0, bypass_mode=True)

    def total(log_probs):
        inside = correct_in_loss(log_probs, rollout, mask, config, padded_sequence_sum)
        return jnp.sum(inside.importance_weights) + jnp.sum(inside.old_log_probs)

    assert total(old) != total(old + 0.01)
    np.testing.assert_array_equal(jax.grad(total)(old), 0)


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        ({"rollout_is_threshold": "high"}, "rollout_is_threshold is 'high', not a number above 0 or a band"),
        ({"rollout_is_threshold": "5_0.5"}, "rollout_is_threshold is '5_0.5'"),
        ({"rollout_is_threshold": -1.0}, "rollout_is_threshold is -1.0"),
        (
            {"rollout_is_batch_normalize": True, "rollout_is": "token", "bypass_mode": True},
            "rollout_is_batch_normalize needs bypass_mode=false",
        ),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, "rollout_rs has 'seq_max_k1', not one of token_k1"),
        ({"rollout_rs": "token_k1"}, "rollout_rs needs algorithm.rollout_correction.rollout_rs_threshold"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold has no effect without"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "for token_k1 is '0.5', not lower_upper or a number"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, "for token_k2 is '0.1_0.2', not one number"),
        ({"rollout_rs": "token_k2,token_k3", "rollout_rs_threshold": "1,2,3"}, "has 3 thresholds for 2 rules"),
    ],
)
def test_faulty_settings_are_named(overrides, fault):
    (message,) = check_settings(correction(**overrides), find_policy_loss("vanilla"))
    assert message.startswith("algorithm.rollout_correction.")
    assert fault in message


def test_good_settings_have_no_faults_and_dppo_takes_no_weights():
    vanilla, dppo = find_policy_loss("vanilla"), find_policy_loss("dppo_tv")
    assert check_settings(correction(), vanilla) == []
    full = correction(
        rollout_is="sequence", rollout_is_threshold="0.5_5.0", rollout_is_batch_normalize=True,
        rollout_rs=",".join(RULES), rollout_rs_threshold=1.5,
    )  # fmt: skip
    assert check_settings(full, vanilla) == []
    (message,) = check_settings(correction(rollout_is="token"), dppo)
    assert "must be null with policy loss dppo_tv" in message


def test_diagnostics_are_their_formulas():
    old, rollout, mask = case_of(5)
    counted = mask > 0
    delta = (old.astype(np.float64) - rollout)[counted]
    metrics = rollout_metrics(poison(old, mask, np.nan), poison(rollout, mask, np.inf), mask)
    difference = np.abs(np.exp(old.astype(np.float64)) - np.exp(rollout.astype(np.float64)))[counted]
    sums = [(o[row].astype(np.float64) - r[row]).sum() for o, r, row in zip(old, rollout, counted) if row.any()]
    means = [(r[row].astype(np.float64) - o[row]).mean() for o, r, row in zip(old, rollout, counted) if row.any()]
    expected = {
        "training/rollout_probs_diff_mean": difference.mean(),
        "training/rollout_probs_diff_max": difference.max(),
        "training/rollout_probs_diff_std": difference.std(),
        "rollout_corr/kl": -delta.mean(),
        "rollout_corr/k3_kl": (np.exp(delta) - 1 - delta).mean(),
        "rollout_corr/chi2_token": np.mean(np.exp(delta) ** 2) - 1,
        "rollout_corr/chi2_seq": np.mean(np.exp(sums) ** 2) - 1,
        "rollout_corr/log_ppl_diff": np.mean(means),
        "rollout_corr/log_ppl_abs_diff": np.mean(np.abs(means)),
    }
    assert metrics == pytest.approx(expected, rel=1e-9)
    assert rollout_metrics(old, rollout, 0 * mask) == {}
    weights = np.array([[1.0, 3.0, 9.0]])
    assert weight_metrics(weights, np.array([[1, 1, 0]])) == {
        "rollout_corr/rollout_is_min": 1.0,
        "rollout_corr/rollout_is_max": 3.0,
        "rollout_corr/rollout_is_std": 1.0,
        "rollout_corr/rollout_is_eff_sample_size": 16 / 20,
    }
