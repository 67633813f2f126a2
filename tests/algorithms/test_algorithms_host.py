"""What runs once a step on the host: group signals, where rewards sit, the overlong penalty, validation metrics."""

from collections import Counter

import numpy as np
import pytest
from algorithm_cases import assert_close, random_mask

from jaxrl_ppo.algorithms.groups import groups_with_signal, zero_signal_groups
from jaxrl_ppo.algorithms.token_rewards import overlong_penalty, place_scores
from jaxrl_ppo.algorithms.validation import validation_metrics


def test_groups_without_signal_are_found():
    group = np.array([2, 0, 0, 1, 1, 2, 3, 4, 4])
    scores = np.array([1.0, 0.1, 0.1 + 5e-7, 0.0, 1.0, 1.0, 0.5, 0.2, 0.2 + 3e-6])
    np.testing.assert_array_equal(groups_with_signal(scores, group), [False, True, False, True, True])
    assert zero_signal_groups(scores, group) == 2
    assert zero_signal_groups(scores[:0], group[:0]) == 0
    # Filtering may leave gaps in the numbering; a number without samples is no group.
    assert zero_signal_groups(np.zeros(2), np.array([5, 5])) == 1


def test_a_score_sits_on_the_last_token_of_the_mask():
    mask = random_mask(np.random.default_rng(0), 10, 7)
    scores = np.linspace(-1, 0.75, 10)
    rewards = place_scores(scores, mask)
    assert rewards.dtype == np.float32
    for row, score, reward in zip(mask > 0, scores, rewards):
        expected = np.zeros(7)
        if row.any():
            expected[np.flatnonzero(row)[-1]] = score
        assert_close(reward, expected, 1e-7)
    assert not place_scores(np.array([np.nan]), np.zeros((1, 3))).any()


def test_overlong_penalty():
    assert_close(overlong_penalty(np.array([0, 60, 80, 90, 100]), 100, 40, 1.0), [0, 0, -0.5, -0.75, -1.0], 1e-6)
    assert_close(overlong_penalty(np.array([120]), 100, 40, 2.0), [-3.0], 1e-6)
    for buffer in (0, 101):
        with pytest.raises(ValueError, match=r"overlong_buffer_cfg\.len is .*, not from 1 to max_resp_len \(100\)"):
            overlong_penalty(np.array([1]), 100, buffer, 1.0)


def draw_by_draw(values, answers, k):
    """best, worst and majority of 1000 seeded draws, one draw at a time."""
    best, worst, majority = [], [], []
    for chosen in np.random.RandomState(42).choice(len(values), (1000, k), replace=True):
        drawn = [values[i] for i in chosen]
        best.append(max(drawn))
        worst.append(min(drawn))
        commonest = Counter(answers[i] for i in chosen).most_common(1)[0][0]
        majority.append(next(values[i] for i in chosen if answers[i] == commonest))
    return np.mean(best), np.mean(worst), np.mean(majority)


def test_validation_metrics_are_those_of_a_loop():
    rng = np.random.default_rng(1)
    sources = ["gsm8k"] * 12 + ["math"] * 2
    prompts = [0, 1] * 6 + [2, 3]
    acc = rng.integers(0, 2, 14).astype(float)
    reward = rng.normal(size=14)
    answers = [str(a) for a in rng.integers(0, 3, 14)]
    metrics = validation_metrics(sources, prompts, {"acc": acc, "reward": reward}, answers)
    rows = [[i for i in range(12) if prompts[i] == p] for p in (0, 1)]
    for name, column, prefix in (("acc", acc, "val-core"), ("reward", reward, "val-aux")):
        start = f"{prefix}/gsm8k/{name}/"
        assert metrics[start + "mean@6"] == pytest.approx(np.mean([column[r].mean() for r in rows]))
        assert metrics[start + "std@6"] == pytest.approx(np.mean([column[r].std() for r in rows]))
        for k in (2, 4, 6):
            loops = [draw_by_draw(column[r], [answers[i] for i in r], k) for r in rows]
            for metric, expected in zip(("best", "worst", "maj"), np.mean(loops, axis=0)):
                assert metrics[f"{start}{metric}@{k}/mean"] == pytest.approx(expected)
        assert metrics[f"{prefix}/math/{name}/mean@1"] == pytest.approx(column[12:].mean())
    per_name = 1 + 1 + 3 * 3 + 1
    assert len(metrics) == 2 * per_name


def test_without_acc_the_reward_is_the_core_metric_and_without_answers_there_is_no_majority():
    metrics = validation_metrics(["s"] * 4, ["p"] * 4, {"reward": [0.0, 1.0, 0.0, 1.0]})
    assert set(metrics) == {
        f"val-core/s/reward/{name}"
        for name in ("mean@4", "std@4", "best@2/mean", "worst@2/mean", "best@4/mean", "worst@4/mean")
    }
    assert metrics["val-core/s/reward/best@4/mean"] == pytest.approx(1 - 1 / 16, abs=0.03)
    with pytest.raises(ValueError, match="reward of sample 1 is not finite"):
        validation_metrics(["s"] * 2, ["p"] * 2, {"reward": [0.0, float("nan")]})
