"""KL estimators, KL in the reward and its controller, and the value loss, against float64 numpy."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import assert_close, oracle_gradient, poison, token_case

from jaxrl_ppo.algorithms.kl import KlController, kl_penalty, penalise_rewards
from jaxrl_ppo.algorithms.value_loss import explained_variance, value_loss


def low_variance(d):
    negative = np.clip(-d, -20, 20)
    return np.clip(np.exp(negative) - negative - 1, -10, 10)


ESTIMATORS = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": low_variance, "abs": np.abs}
NAMES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}


def kl_case(seed):
    case = token_case(seed)
    return case["log_probs"], case["old_log_probs"], case["mask"]


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("name", NAMES)
def test_kl_value_and_gradient_are_the_formula_s(name, plus):
    new, ref, mask = kl_case(0)
    weights = np.linspace(0.5, 1.5, new.size).reshape(new.shape)

    def oracle(kind):
        return lambda x: np.where(mask > 0, ESTIMATORS[kind](x - ref.astype(np.float64)), 0) * weights

    value, gradient = jax.value_and_grad(lambda x: jnp.sum(kl_penalty(x, ref, mask, name + plus) * weights))(
        jnp.asarray(new)
    )
    assert_close(kl_penalty(jnp.asarray(new), ref, mask, name + plus) * weights, oracle(NAMES[name])(new), 1e-5)
    assert_close(value, oracle(NAMES[name])(new).sum(), 1e-5)
    assert_close(gradient, oracle_gradient(oracle("k2" if plus else NAMES[name]), new), 1e-3)


@pytest.mark.parametrize("name", ["k1", "k2+", "k3", "k3+", "abs"])
def test_kl_lets_nothing_in_from_outside_the_mask(name):
    new, ref, mask = kl_case(1)
    compute = jax.value_and_grad(lambda x, y: jnp.sum(kl_penalty(x, y, mask, name)))
    clean = compute(jnp.asarray(new), ref)
    for bad in (np.nan, np.inf, -np.inf):
        dirty = compute(jnp.asarray(poison(new, mask, bad)), poison(ref, mask, bad))
        np.testing.assert_array_equal(dirty[0], clean[0])
        np.testing.assert_array_equal(dirty[1], clean[1])


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="the KL estimator is 'k4', not one of"):
        kl_penalty(jnp.zeros(1), jnp.zeros(1), jnp.ones(1), "k4")


def test_kl_in_the_reward():
    new, ref, mask = kl_case(2)
    scores = np.random.default_rng(3).normal(size=mask.shape).astype(np.float32)
    difference = np.where(mask > 0, new.astype(np.float64) - ref, 0)
    sample_means = difference.sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    for bad in (0.0, np.nan):
        rewards, kl = penalise_rewards(
            *(poison(x, mask, bad) for x in (scores, new, ref)), mask=mask, coefficient=0.3, kind="kl"
        )
        assert rewards.dtype == np.float32
        assert_close(rewards, np.where(mask > 0, scores - 0.3 * difference, 0), 1e-5)
        assert_close(kl, sample_means.mean(), 1e-5)


def control(kind):
    return SimpleNamespace(type=kind, kl_coef=0.1, horizon=1000, target_kl=0.5)


def test_the_adaptive_controller_follows_its_formula_and_resumes():
    controller = KlController(control("adaptive"))
    expected = 0.1
    for kl in (0.55, 10.0, 0.0, 0.45):
        controller.update(kl, 64)
        expected *= 1 + np.clip(kl / 0.5 - 1, -0.2, 0.2) * 64 / 1000
        assert controller.coefficient == pytest.approx(expected, rel=1e-12)
    resumed = KlController(control("adaptive"))
    resumed.restore(controller.state())
    assert resumed.coefficient == controller.coefficient


def test_the_fixed_controller_stays():
    controller = KlController(control("fixed"))
    controller.update(100.0, 64)
    controller.restore({"coefficient": 0.7})
    assert controller.coefficient == 0.1
    with pytest.raises(ValueError, match=r"kl_ctrl\.type is 'pid'"):
        KlController(control("pid"))


def value_case(seed):
    rng = np.random.default_rng(seed)
    mask = token_case(seed)["mask"]
    arrays = (rng.normal(0, 1, mask.shape).astype(np.float32) for _ in range(3))
    return *arrays, mask


def value_oracle(values, old, returns, mask, clip):
    clipped = np.clip(values, old - clip, old + clip)
    loss = 0.5 * np.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return np.where(mask > 0, loss, 0)


def test_value_loss_and_gradient_are_the_formula_s():
    values, old, returns, mask = value_case(4)
    weights = np.linspace(0.5, 1.5, values.size).reshape(values.shape)
    gradient = jax.grad(lambda v: jnp.sum(value_loss(v, old, returns, mask, 0.4)[0] * weights))(jnp.asarray(values))
    token_loss, metrics = value_loss(jnp.asarray(values), old, returns, mask, 0.4)
    others = [x.astype(np.float64) for x in (old, returns)]
    assert_close(token_loss, value_oracle(values.astype(np.float64), *others, mask, 0.4), 1e-5)
    expected = oracle_gradient(lambda v: value_oracle(v, *others, mask, 0.4) * weights, values)
    assert_close(gradient, expected, 1e-3)
    clipped_is_worse = (np.clip(values, old - 0.4, old + 0.4) - returns) ** 2 > (values - returns) ** 2
    assert_close(metrics["vf_clipfrac"], clipped_is_worse & (mask > 0), 0)
    assert_close(metrics["vpred_mean"], np.where(mask > 0, values, 0), 0)


def test_value_loss_lets_nothing_in_from_outside_the_mask():
    values, old, returns, mask = value_case(5)
    compute = jax.value_and_grad(lambda v, o, r: jnp.sum(value_loss(v, o, r, mask, 0.4)[0]))
    clean = compute(jnp.asarray(values), old, returns)
    for bad in (np.nan, np.inf, -np.inf):
        dirty = compute(*(jnp.asarray(poison(x, mask, bad)) for x in (values, old, returns)))
        np.testing.assert_array_equal(dirty[0], clean[0])
        np.testing.assert_array_equal(dirty[1], clean[1])


def test_explained_variance():
    values, _, returns, mask = value_case(6)
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(0 * values, returns, mask) == pytest.approx(0.0)
    half = returns + np.float32(0.5) * (values - values[mask > 0].mean())
    chosen = (returns - half)[mask > 0]
    expected = 1 - chosen.var() / returns[mask > 0].var()
    assert explained_variance(poison(half, mask, np.nan), returns, mask) == pytest.approx(expected, rel=1e-4)
    assert explained_variance(values, np.ones_like(returns), mask) == 0.0
    no_reward = values + (np.float32(0.1) - values) - np.float32(0.1)  # nothing but the rounding of a sum
    assert np.ptp(no_reward[mask > 0]) > 0
    assert explained_variance(values, no_reward, mask) == 0.0
