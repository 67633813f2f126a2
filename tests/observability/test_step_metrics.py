"""Metrics of a step against numbers reckoned by hand."""

import numpy as np
import pytest

from jaxrl_ppo.observability.metrics import (
    WeightedMeans,
    batch_metrics,
    mfu_metrics,
    time_metrics,
    training_flops,
    zero_signal_groups,
)


def test_scores_lengths_and_groups(batch):
    metrics = batch_metrics(batch, max_prompt_length=5, max_response_length=4)
    assert metrics["critic/score/mean"] == 0.5
    assert (metrics["critic/score/max"], metrics["critic/score/min"]) == (1.0, 0.0)
    # Lengths 2, 4, 3 (a tool's token in between counts) and 0.
    assert metrics["response_length/mean"] == 2.25
    assert (metrics["response_length/max"], metrics["response_length/min"]) == (4, 0)
    assert metrics["response_length/clip_ratio"] == 0.25
    assert metrics["prompt_length/mean"] == 4
    assert metrics["prompt_length/clip_ratio"] == 0.5
    assert metrics["actor/zero_signal_groups"] == 1
    assert not any(name.startswith(("critic/values", "training/")) for name in metrics)


def test_token_columns_count_only_sampled_tokens(batch):
    mask = batch.response_mask > 0
    for name in ("token_rewards", "advantages", "returns", "values"):
        setattr(batch, name, np.where(mask, np.float32(2), np.float32(np.nan)))
    batch.advantages[0, 0] = -1
    metrics = batch_metrics(batch, max_prompt_length=5, max_response_length=4)
    assert metrics["critic/values/mean"] == 2
    assert metrics["critic/advantages/min"] == -1
    assert metrics["critic/advantages/mean"] == pytest.approx((7 * 2 - 1) / 8)
    assert metrics["critic/rewards/mean"] == pytest.approx((4 + 8 + 4 + 0) / 4)


def test_a_group_of_one_is_not_without_signal():
    scores = np.array([0.0, 1.0, 1.0 + 5e-7, 0.2, 0.3], np.float32)
    assert zero_signal_groups(scores, np.array([0, 1, 1, 2, 2])) == 1


def test_throughput_is_over_all_devices(batch):
    metrics = time_metrics({"gen": 2.0, "update_actor": 5.0, "update_weights": 1.0, "step": 10.0}, batch, devices=4)
    tokens = 9 + 3 + 3 + 5 + 5
    assert metrics["perf/total_num_tokens"] == tokens
    assert metrics["perf/throughput"] == pytest.approx(tokens / 10 / 4)
    assert metrics["timing_per_token_ms/gen"] == pytest.approx(2000 / 9)
    assert metrics["timing_per_token_ms/update_actor"] == pytest.approx(5000 / tokens)
    assert "timing_per_token_ms/step" not in metrics
    assert "timing_per_token_ms/update_weights" not in metrics
    assert metrics["perf/time_per_step"] == metrics["timing_s/step"] == 10
    with pytest.raises(ValueError, match="devices"):
        time_metrics({"step": 1.0}, batch, devices=0)


def test_flops_and_mfu():
    # One layer, d = 2 heads x 3: matmul weights 10; lengths 4 and 2: 6*10*6 + 6*1*6*(16+4).
    flops = training_flops([4, 2], parameters=10, layers=1, attention_width=6)
    assert flops == 360 + 720
    mfu = mfu_metrics({"actor": flops}, {"actor": 2.0}, peak_flops=540.0, devices=2)
    assert mfu == {"perf/mfu/actor": pytest.approx(0.5)}
    assert mfu_metrics({"actor": flops}, {"actor": 2.0}, peak_flops=None, devices=2) == {}


def test_weighted_means_merge_exactly():
    values, weights = np.arange(12.0), np.arange(1.0, 13.0)
    whole, left, right = WeightedMeans(), WeightedMeans(), WeightedMeans()
    whole.add("a", float(values @ weights), float(weights.sum()))
    left.add("a", float(values[:5] @ weights[:5]), float(weights[:5].sum()))
    right.add("a", float(values[5:] @ weights[5:]), float(weights[5:].sum()))
    right.add("empty", 0.0, 0.0)
    left.merge(right)
    assert left.result() == whole.result() == {"a": pytest.approx(np.average(values, weights=weights))}
