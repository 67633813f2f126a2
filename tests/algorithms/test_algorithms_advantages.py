"""Every advantage estimator against its formula in float64 numpy, on ragged masks with holes and unequal groups."""

import logging

import numpy as np
import pytest
from algorithm_cases import assert_close, poison, random_groups, random_mask, settings

from jaxrl_ppo.algorithms.advantages import AdvantageInputs, advantage_function, find_advantage
from jaxrl_ppo.algorithms.advantages.group_baselines import _warn_of_single_samples
from jaxrl_ppo.algorithms.registry import ADVANTAGES

# Each oracle goes sample by sample or group by group. x: the inputs as float64 attributes; s: the settings.


def whiten(x, mask):
    chosen = x[mask > 0]
    return np.where(mask > 0, (x - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8), 0)


def spread(x, per_sample):
    return np.where(x.mask > 0, np.asarray(per_sample)[:, None], 0.0)


def by_group(x, of_group):
    """of_group(indices of a group's samples) -> their values; put back in order."""
    result = np.zeros(len(x.group))
    for number in np.unique(x.group):
        members = np.flatnonzero(x.group == number)
        result[members] = of_group(members)
    return result


def gae(x, s):
    advantages, returns = np.zeros(x.mask.shape), np.zeros(x.mask.shape)
    for i, row in enumerate(x.mask > 0):
        rewards, values = x.token_rewards[i, row], np.append(x.values[i, row], 0.0)
        deltas = rewards + s.gamma * values[1:] - values[:-1]
        n = len(rewards)
        discounts = [[(s.gamma * s.lam) ** (u - t) if u >= t else 0.0 for u in range(n)] for t in range(n)]
        advantages[i, row] = np.array(discounts).reshape(n, n) @ deltas
        returns[i, row] = advantages[i, row] + values[:-1]
    return whiten(advantages, x.mask), returns


def relative(scores, by_std):
    if len(scores) == 1:
        return scores
    return (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6 if by_std else 1.0)


def grpo(x, s):
    result = spread(x, by_group(x, lambda m: relative(x.scores[m], s.norm_adv_by_std_in_grpo)))
    return result, result


def grpo_passk(x, s):
    def of_group(members):
        scores = x.scores[members]
        second, best = np.sort(scores)[-2:]
        lead = (best - second) / (scores.std(ddof=1) + 1e-6 if s.norm_adv_by_std_in_grpo else 1.0)
        return np.where(np.arange(len(members)) == np.argmax(scores), lead, 0.0)

    result = spread(x, by_group(x, of_group))
    return result, result


def gdpo(x, s):
    total = 0.0
    for part, weight in zip(x.reward_parts.T, x.reward_weights):
        total = total + weight * by_group(x, lambda m, p=part: relative(p[m], s.norm_adv_by_std_in_grpo))
    result = whiten(spread(x, total), x.mask)
    return result, result


def rloo(x, s):
    def of_group(members):
        scores = x.scores[members]
        n = len(scores)
        return [scores[i] - np.delete(scores, i).mean() if n > 1 else 0.0 for i in range(n)]

    result = spread(x, by_group(x, of_group))
    return result, result


def reinforce_plus_plus(x, s):
    returns = np.zeros(x.mask.shape)
    for i, row in enumerate(x.mask > 0):
        rewards = x.token_rewards[i, row]
        returns[i, row] = [sum(s.gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    return whiten(returns, x.mask), returns


def reinforce_plus_plus_baseline(x, s):
    centred = by_group(x, lambda m: x.scores[m] - x.scores[m].mean())
    result = whiten(spread(x, centred), x.mask)
    return result, result


def returns_to_go(x):
    returns = np.zeros(x.mask.shape)
    for i, row in enumerate(x.mask > 0):
        rewards = x.token_rewards[i, row]
        returns[i, row] = [rewards[t:].sum() for t in range(len(rewards))]
    return returns


def remax(x, s):
    returns = returns_to_go(x)
    return returns - spread(x, x.greedy_scores), returns


def opo(x, s):
    def of_group(members):
        lengths = (x.mask[members] > 0).sum(axis=1)
        baseline = (lengths * x.scores[members]).sum() / max(lengths.sum(), 1)
        return x.scores[members] - baseline

    result = spread(x, by_group(x, of_group))
    return result, result


def gpg(x, s):
    alpha = len(x.scores) / max(np.count_nonzero(x.scores), 1)
    result = spread(x, alpha * by_group(x, lambda m: x.scores[m] - x.scores[m].mean()))
    return result, result


def token_baseline(x, places):
    """places[i]: the step number of each of sample i's tokens in the mask."""
    returns, advantages = returns_to_go(x), np.zeros(x.mask.shape)
    uncertainty = 1 - 2 * np.exp(x.old_log_probs) + x.sum_pi_squared
    rows = [np.flatnonzero(row > 0) for row in x.mask]
    for i, row in enumerate(rows):
        for position, step in zip(row, places[i]):
            weighted, weights = 0.0, 0.0
            for j in np.flatnonzero(x.group == x.group[i]):
                if step in places[j]:
                    there = list(places[j]).index(step)
                    weight = uncertainty[j, rows[j][: there + 1]].sum()
                    weighted += returns[j, rows[j][there]] * weight
                    weights += weight
            advantages[i, position] = returns[i, position] - weighted / (weights + 1e-8)
    return advantages, returns


def optimal_token_baseline(x, s):
    return token_baseline(x, [np.flatnonzero(row > 0) for row in x.mask])


def tir_optimal_token_baseline(x, s):
    return token_baseline(x, [np.arange((row > 0).sum()) for row in x.mask])


ORACLES = {
    f.__name__: f
    for f in (
        gae, grpo, grpo_passk, gdpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, opo, gpg,
        optimal_token_baseline, tir_optimal_token_baseline,
    )
}  # fmt: skip


def make_inputs(seed, samples=14, tokens=9, singletons=True):
    """Random inputs with a reward on every token, an empty response, and groups of unequal size."""
    rng = np.random.default_rng(seed)
    mask = random_mask(rng, samples, tokens)
    group = random_groups(rng, samples)
    if not singletons:
        counts = np.bincount(group, minlength=samples)
        group[counts[group] == 1] = np.argmax(counts)
    arrays = {
        "token_rewards": rng.normal(size=mask.shape) * (rng.random(mask.shape) < 0.5),
        "mask": mask,
        "values": rng.normal(size=mask.shape),
        "greedy_scores": rng.normal(size=samples),
        "reward_parts": rng.normal(size=(samples, 3)),
        "reward_weights": np.array([1.0, 0.5, -0.25]),
        "old_log_probs": -rng.exponential(1.0, mask.shape),
        "sum_pi_squared": rng.uniform(0.1, 1.0, mask.shape),
    }
    return AdvantageInputs(**{name: x.astype(np.float32) for name, x in arrays.items()}, group=group)


def exact(inputs):
    """The inputs in float64, with the samples' scores."""
    fields = {name: np.asarray(x, np.float64) for name, x in vars(inputs).items()}
    fields["scores"] = np.where(fields["mask"] > 0, fields["token_rewards"], 0).sum(axis=1)
    return type("Exact", (), fields)


def test_every_registered_estimator_has_an_oracle_here():
    assert set(ADVANTAGES) == set(ORACLES)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("name", ORACLES)
def test_values_are_the_formula_s(name, by_std):
    config = settings(norm_adv_by_std_in_grpo=by_std)
    compute = advantage_function(find_advantage(name), config)
    for seed in range(4):
        inputs = make_inputs(seed, singletons=name != "grpo_passk")
        advantages, returns = compute(inputs)
        expected_advantages, expected_returns = ORACLES[name](exact(inputs), config)
        assert advantages.dtype == returns.dtype == np.float32
        assert_close(advantages, expected_advantages, 1e-5)
        assert_close(returns, expected_returns, 1e-5)
        assert np.abs(advantages).max() > 0.1


@pytest.mark.parametrize("name", ORACLES)
def test_nothing_leaks_from_outside_the_mask(name):
    compute = advantage_function(find_advantage(name), settings())
    inputs = make_inputs(9, singletons=name != "grpo_passk")
    clean = compute(inputs)
    for bad in (np.nan, np.inf, -np.inf):
        fields = {n: poison(x, inputs.mask, bad) for n, x in vars(inputs).items() if np.shape(x) == inputs.mask.shape}
        dirty = compute(AdvantageInputs(**{**vars(inputs), **fields, "mask": inputs.mask}))
        for before, after in zip(clean, dirty, strict=True):
            np.testing.assert_array_equal(after, before)
            np.testing.assert_array_equal(after[inputs.mask == 0], 0)


@pytest.mark.parametrize("name", ["grpo", "gdpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg"])
def test_a_group_of_equal_scores_gets_exactly_nothing(name):
    scores = np.repeat(np.float32([0.1, 0.7, 1 / 3]), 7)
    inputs = AdvantageInputs(
        token_rewards=scores[:, None],
        mask=np.ones((21, 1), np.float32),
        group=np.repeat([0, 1, 2], 7),
        reward_parts=scores[:, None],
        reward_weights=np.ones(1, np.float32),
    )
    np.testing.assert_array_equal(advantage_function(find_advantage(name), settings())(inputs)[0], 0)


def test_groups_may_be_numbered_anyhow():
    inputs = make_inputs(3)
    compute = advantage_function(find_advantage("grpo"), settings())
    far_apart = AdvantageInputs(**{**vars(inputs), "group": inputs.group.astype(np.int64) * 10**12 - 5})
    np.testing.assert_array_equal(compute(far_apart)[0], compute(inputs)[0])


def test_scores_keep_their_fractions():
    inputs = AdvantageInputs(
        token_rewards=np.array([[0.75], [0.25]]), mask=np.ones((2, 1), int), group=np.array([0, 0])
    )
    advantages, _ = advantage_function(find_advantage("grpo"), settings(norm_adv_by_std_in_grpo=False))(inputs)
    assert_close(advantages, [[0.25], [-0.25]], 1e-7)


def test_missing_inputs_and_impossible_ones_are_errors():
    inputs = make_inputs(5)
    without = AdvantageInputs(token_rewards=inputs.token_rewards, mask=inputs.mask, group=inputs.group)
    for name, needed in (("gae", "values"), ("remax", "greedy_scores"), ("gdpo", "reward_parts, reward_weights")):
        with pytest.raises(ValueError, match=f"adv_estimator={name} needs {needed}"):
            advantage_function(find_advantage(name), settings())(without)
    with pytest.raises(ValueError, match=r"grpo_passk compares .* 1 prompts have one sample .*rollout\.n to 2"):
        advantage_function(find_advantage("grpo_passk"), settings())(inputs)
    one_token = np.zeros_like(inputs.mask)
    one_token[0, 0] = 1
    with pytest.raises(ValueError, match="whitened over the step's response tokens, but there are only 1"):
        advantage_function(find_advantage("gae"), settings())(AdvantageInputs(**{**vars(inputs), "mask": one_token}))
    broken = inputs.token_rewards.copy()
    broken[0, 0] = np.nan
    with pytest.raises(ValueError, match=r"advantages are not finite in .* samples, first in sample 0"):
        advantage_function(find_advantage("opo"), settings())(
            AdvantageInputs(**{**vars(inputs), "token_rewards": broken})
        )


def test_rloo_warns_once_of_prompts_with_one_sample(caplog):
    _warn_of_single_samples.cache_clear()
    compute = advantage_function(find_advantage("rloo"), settings())
    with caplog.at_level(logging.WARNING):
        compute(make_inputs(6))
        compute(make_inputs(7))
    assert [record.message for record in caplog.records if "one sample" in record.message] == [
        "algorithm.adv_estimator=rloo: a prompt with one sample has no other to be compared with; its advantage is 0"
    ]
