"""Every policy loss against its formula in float64 numpy: values, gradients, layouts, leaks from outside the mask."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import assert_close, oracle_gradient, poison, random_packing, settings, token_case

from jaxrl_ppo.algorithms.aggregation import token_weights, weighted_sum
from jaxrl_ppo.algorithms.masked import packed_sequence_sum, padded_sequence_sum
from jaxrl_ppo.algorithms.policy_losses import PolicyLossInputs, compute_policy_loss, find_policy_loss
from jaxrl_ppo.algorithms.policy_losses.covariance import select_clip_cov, select_kl_cov
from jaxrl_ppo.algorithms.registry import POLICY_LOSSES

# Each oracle is the loss of one sample's tokens in the mask, from `new` log-probs; `sg` holds their values where the
# formula stops the gradient. c: the sample's other arrays as attributes. Importance weights come after, for all alike.


def ratio(new, old):
    return np.exp(np.clip(new - old, -20, 20))


def clip_ratio(r, s):
    return np.clip(r, 1 - s.clip_ratio_low, 1 + s.clip_ratio_high)


def vanilla(new, sg, c, s):
    r = ratio(new, c.old)
    loss = np.maximum(-c.adv * r, -c.adv * clip_ratio(r, s))
    return np.where(c.adv < 0, np.minimum(loss, -c.adv * s.clip_ratio_c), loss)


def gspo(new, sg, c, s):
    sequence = (sg - c.old).sum() / max(len(new), 1)
    r = np.exp(np.minimum(new - sg + sequence, 10))
    return np.maximum(-c.adv * r, -c.adv * clip_ratio(r, s))


def sapo(new, sg, c, s):
    tau = np.where(c.adv > 0, s.tau_pos, s.tau_neg)
    return -c.adv * 4 / tau / (1 + np.exp(-tau * (ratio(new, c.old) - 1)))


def cispo(new, sg, c, s):
    return -clip_ratio(ratio(sg, c.old), s) * c.adv * new


def gpg(new, sg, c, s):
    return -c.adv * new


def geo_mean(new, sg, c, s):
    delta = np.clip(new - c.old, -20, 20)
    sign = np.sign(c.adv)
    bounded = sign * np.minimum(sign * delta, sign * np.clip(delta, -s.clip_ratio_low, s.clip_ratio_high))
    n = max(len(new), 1)
    return np.full(len(new), -(c.adv.sum() / n) * np.exp(bounded.sum() / n))


def clip_cov(new, sg, c, s):
    r = ratio(new, c.old)
    return np.maximum(-c.adv * r, -c.adv * clip_ratio(r, s)) * ~c.selected


def kl_cov(new, sg, c, s):
    return -c.adv * ratio(new, c.old) + c.selected * s.ppo_kl_coef * np.abs(np.clip(new - c.old, -20, 20))


def dppo(inside, new, sg, c, s):
    return -c.adv * np.minimum(ratio(sg, c.rollout), s.clip_ratio_c) * inside * new


def dppo_tv(new, sg, c, s):
    moved = np.exp(sg) - np.exp(c.rollout)
    inside = np.where(c.adv > 0, moved <= s.clip_ratio_high, moved >= -s.clip_ratio_low)
    return dppo(inside, new, sg, c, s)


def dppo_kl(new, sg, c, s):
    p, q = np.exp(sg), np.exp(c.rollout)
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    moved_up, moved_down = p > q, p < q
    outside = np.where(c.adv > 0, (kl > s.clip_ratio_high) & moved_up, (kl > s.clip_ratio_low) & moved_down)
    return dppo(~outside, new, sg, c, s)


def dro(new, sg, c, s):
    return -(new * c.adv - 0.5 * s.dro_beta * (new - c.old) ** 2)


ORACLES = {f.__name__: f for f in (vanilla, gspo, sapo, cispo, gpg, geo_mean, clip_cov, kl_cov, dppo_tv, dppo_kl, dro)}
FIXED_AGGREGATION = {"gspo", "sapo", "geo_mean"}
CONFIG = settings()


@dataclasses.dataclass
class Sample:
    old: np.ndarray
    adv: np.ndarray
    rollout: np.ndarray
    selected: np.ndarray


def oracle(name, case, new):
    """Loss of each token, [B, T] float64, with importance weights; 0 outside the mask."""
    result = np.zeros(case["mask"].shape)
    for i, row in enumerate(case["mask"] > 0):
        columns = ("old_log_probs", "advantages", "rollout_log_probs")
        c = Sample(*(case[column][i, row].astype(np.float64) for column in columns), case["selected"][i, row] > 0)
        loss = ORACLES[name](new[i, row], case["log_probs"][i, row].astype(np.float64), c, CONFIG)
        result[i, row] = loss * case["importance_weights"][i, row].astype(np.float64)
    return result


def make_case(seed):
    case = token_case(seed)
    rng = np.random.default_rng(seed + 100)
    case["selected"] = (rng.random(case["mask"].shape) < 0.4).astype(np.float32)
    return case


@functools.cache
def total(name, sequence_sum=padded_sequence_sum):
    """From a case and its weights: ((aggregated loss, token losses), gradient by log_probs). Compiled once."""
    loss = find_policy_loss(name)

    def value(log_probs, case, weights):
        inputs = PolicyLossInputs(**{**case, "log_probs": log_probs}, sequence_sum=sequence_sum)
        token_loss, _ = compute_policy_loss(loss, inputs, CONFIG)
        return weighted_sum(token_loss, weights), token_loss

    compiled = jax.jit(jax.value_and_grad(value, has_aux=True))
    return lambda case, weights: compiled(case["log_probs"], case, weights)


def weights_for(name, case):
    mode = find_policy_loss(name).aggregation or "token-mean"
    return token_weights(mode, case["mask"])


def test_every_registered_loss_has_an_oracle_here():
    assert set(POLICY_LOSSES) == set(ORACLES)
    assert {name for name, loss in POLICY_LOSSES.items() if loss.aggregation} == FIXED_AGGREGATION
    assert {loss.aggregation for loss in POLICY_LOSSES.values()} == {None, "seq-mean-token-mean"}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ORACLES)
def test_value_and_gradient_are_the_formula_s(name, seed):
    case = make_case(seed)
    weights = weights_for(name, case)
    (value, token_loss), gradient = total(name)(case, weights)
    expected = oracle(name, case, case["log_probs"].astype(np.float64))
    assert_close(token_loss, expected, 1e-5)
    assert_close(value, np.sum(expected * weights), 1e-5)
    assert_close(gradient, oracle_gradient(lambda new: oracle(name, case, new) * weights, case["log_probs"]), 1e-3)


@pytest.mark.parametrize("name", ORACLES)
def test_packed_rows_give_what_padded_rows_give(name):
    case = make_case(3)
    weights = weights_for(name, case)
    packing = random_packing(np.random.default_rng(4), *case["mask"].shape, per_row=5)
    packed = {column: packing.pack(value) for column, value in case.items()}
    sums = packed_sequence_sum(jnp.asarray(packing.sample_ids), packing.samples_per_row)
    (value, token_loss), gradient = total(name)(case, weights)
    (there, token_loss_there), gradient_there = total(name, sums)(packed, packing.pack(weights))
    assert_close(there, value, 1e-5)
    assert_close(packing.unpack(np.asarray(token_loss_there)), token_loss, 1e-5)
    assert_close(packing.unpack(np.asarray(gradient_there)), gradient, 1e-5)


@pytest.mark.parametrize("name", ORACLES)
def test_nothing_leaks_from_outside_the_mask(name):
    case = make_case(5)
    weights = weights_for(name, case)
    (value, _), gradient = total(name)(case, weights)
    assert np.isfinite(value)
    for bad in (np.nan, np.inf, -np.inf):
        dirty = {n: column if n == "mask" else poison(column, case["mask"], bad) for n, column in case.items()}
        (there, token_loss), gradient_there = total(name)(dirty, weights)
        np.testing.assert_array_equal(there, value)
        np.testing.assert_array_equal(gradient_there, gradient)
        np.testing.assert_array_equal(np.asarray(token_loss)[case["mask"] == 0], 0)
    assert not np.any(np.asarray(gradient)[case["mask"] == 0])


def test_only_log_probs_carry_a_gradient():
    case = make_case(6)

    def value(others):
        inputs = PolicyLossInputs(**{**case, **others})
        return jnp.sum(compute_policy_loss(find_policy_loss("vanilla"), inputs, CONFIG)[0])

    fields = ("old_log_probs", "advantages", "importance_weights", "rollout_log_probs")
    for gradient in jax.grad(value)({name: jnp.asarray(case[name]) for name in fields}).values():
        np.testing.assert_array_equal(gradient, 0)


def test_metrics_of_the_clipped_loss():
    # A = 1: ratios inside and above the range; A = -1: below it, and above the dual clip. The last is not counted.
    log_probs = np.log(np.array([[1.1, 1.5, 0.5, 4.0, 9.0]], np.float32))
    inputs = PolicyLossInputs(
        log_probs=log_probs,
        old_log_probs=np.zeros_like(log_probs),
        advantages=np.array([[1.0, 1.0, -1.0, -1.0, -1.0]], np.float32),
        mask=np.array([[1, 1, 1, 1, 0]], np.float32),
    )
    token_loss, metrics = compute_policy_loss(find_policy_loss("vanilla"), inputs, CONFIG)
    assert_close(token_loss, [[-1.1, -1.28, 0.8, 3.0, 0.0]], 1e-6)
    assert_close(metrics["pg_clipfrac"], [[0, 1, 1, 0, 0]], 0)
    assert_close(metrics["pg_clipfrac_lower"], [[0, 0, 0, 1, 0]], 0)
    assert_close(metrics["ppo_kl"], np.where(inputs.mask > 0, -log_probs, 0), 1e-6)


def test_a_missing_input_is_named():
    case = token_case(7)
    inputs = PolicyLossInputs(**{**case, "rollout_log_probs": None})
    with pytest.raises(ValueError, match="policy loss dppo_tv needs rollout_log_probs"):
        compute_policy_loss(find_policy_loss("dppo_tv"), inputs, CONFIG)
    with pytest.raises(ValueError, match="policy loss kl_cov needs selected"):
        compute_policy_loss(find_policy_loss("kl_cov"), inputs, CONFIG)
    with pytest.raises(ValueError, match=r"needs actor_rollout_ref\.actor\.policy_loss\.dro_beta"):
        compute_policy_loss(find_policy_loss("dro"), inputs, settings(dro_beta=None))


def covariances(case):
    counted = case["mask"] > 0
    log_probs, advantages = case["old_log_probs"].astype(np.float64), case["advantages"].astype(np.float64)
    cov = (advantages - advantages[counted].mean()) * (log_probs - log_probs[counted].mean())
    return np.where(counted, cov, np.nan), counted


def test_kl_cov_selects_the_greatest_covariances():
    case = token_case(8)
    cov, counted = covariances(case)
    selected = select_kl_cov(case["old_log_probs"], case["advantages"], case["mask"], settings(kl_cov_ratio=0.1), 0)
    count = int(0.1 * counted.sum())
    assert selected.sum() == count > 1
    assert np.nanmin(np.where(selected, cov, np.nan)) >= np.sort(cov[counted])[-count]
    tiny, none = (
        select_kl_cov(case["old_log_probs"], case["advantages"], case["mask"], settings(kl_cov_ratio=ratio), 0)
        for ratio in (1e-6, 0.0)
    )
    assert (tiny.sum(), none.sum()) == (1, 0)


def test_clip_cov_selects_a_seeded_share_between_the_bounds():
    case = token_case(9)
    cov, counted = covariances(case)
    config = settings(clip_cov_ratio=0.1, clip_cov_lb=-0.5, clip_cov_ub=0.5)

    def select(seed):
        return select_clip_cov(case["old_log_probs"], case["advantages"], case["mask"], config, seed)

    selected = select(1)
    assert selected.sum() == int(0.1 * counted.sum()) > 1
    assert np.all((cov[selected] > -0.5) & (cov[selected] < 0.5))
    np.testing.assert_array_equal(select(1), selected)
    assert not np.array_equal(select(2), selected)
    narrow = settings(clip_cov_ratio=0.1, clip_cov_lb=1e6, clip_cov_ub=2e6)
    assert not select_clip_cov(case["old_log_probs"], case["advantages"], case["mask"], narrow, 1).any()


@pytest.mark.parametrize("select", [select_clip_cov, select_kl_cov])
def test_selection_sees_nothing_outside_the_mask(select):
    case = token_case(10)
    clean = select(case["old_log_probs"], case["advantages"], case["mask"], CONFIG, 3)
    dirty = (poison(case[name], case["mask"], np.nan) for name in ("old_log_probs", "advantages"))
    np.testing.assert_array_equal(select(*dirty, case["mask"], CONFIG, 3), clean)
    assert clean.any()
    assert not clean[case["mask"] == 0].any()
    assert not select(case["old_log_probs"], case["advantages"], 0 * case["mask"], CONFIG, 3).any()
