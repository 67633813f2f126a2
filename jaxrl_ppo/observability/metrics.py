"""A step's numbers under the names verl gives them: rewards, lengths, time, MFU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxrl_ppo.schema.records import Batch

# Phases whose work is per response token; every other phase's is per token of prompt and response.
PER_RESPONSE_TOKEN = frozenset({"gen", "reward"})
# Phases without a sensible time per token.
NOT_PER_TOKEN = frozenset({"step", "update_weights", "testing", "save_checkpoint"})
ZERO_SIGNAL_TOLERANCE = 1e-6


class WeightedMeans:
    """Means whose sum and weight stay apart until they are read, so that merging over parts is exact."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[float, float]] = {}

    def add(self, name: str, total: float, weight: float) -> None:
        """Add `total`, a sum over things that weigh `weight` together (usually their number)."""
        old_total, old_weight = self._parts.get(name, (0.0, 0.0))
        self._parts[name] = (old_total + total, old_weight + weight)

    def merge(self, other: WeightedMeans) -> None:
        """Add everything `other` holds: another micro-batch, device or process."""
        for name, (total, weight) in other._parts.items():
            self.add(name, total, weight)

    def result(self) -> dict[str, float]:
        """The means; a name whose weight is 0 is absent."""
        return {name: total / weight for name, (total, weight) in self._parts.items() if weight}


def batch_metrics(
    batch: Batch,
    *,
    max_prompt_length: int,
    max_response_length: int,
) -> dict[str, float]:
    """What the batch of one step looks like: `critic/*`, `response_length/*` and `prompt_length/*`.

    Columns that the step did not compute give no metrics.
    """
    mask = batch.response_mask > 0
    metrics = _spread("critic/score", batch.scores)
    if batch.token_rewards is not None:
        metrics |= _spread("critic/rewards", np.where(mask, batch.token_rewards, 0).sum(axis=-1))
    for name in ("advantages", "returns", "values"):
        column = getattr(batch, name)
        if column is not None:
            metrics |= _spread(f"critic/{name}", column[mask])
    metrics |= _lengths("response_length", response_lengths(batch), max_response_length)
    metrics |= _lengths("prompt_length", prompt_lengths(batch), max_prompt_length)
    metrics["actor/zero_signal_groups"] = float(zero_signal_groups(batch.scores, batch.group))
    return metrics


def own_log_probs(batch: Batch) -> np.ndarray | None:
    """The trainer's own log-probs [B, T] of the batch; None in bypass mode, where the engine's stand in for them."""
    return None if batch.old_log_probs is batch.rollout_log_probs else batch.old_log_probs


def response_lengths(batch: Batch) -> np.ndarray:
    """Tokens of each response, [B]: up to the last one the policy sampled, tokens of tools in between included."""
    mask = batch.response_mask > 0
    return np.where(mask.any(axis=-1), mask.shape[-1] - np.argmax(mask[:, ::-1], axis=-1), 0)


def prompt_lengths(batch: Batch) -> np.ndarray:
    """Tokens of each sample's prompt, [B]."""
    return np.array([len(prompt.token_ids) for prompt in batch.prompts])[batch.group]


def zero_signal_groups(scores: np.ndarray, group: np.ndarray) -> int:
    """Groups of at least two samples whose scores are equal within 1e-6: GRPO learns nothing from them."""
    count = 0
    for number in np.unique(group):
        of_group = scores[group == number]
        count += len(of_group) > 1 and float(of_group.max() - of_group.min()) <= ZERO_SIGNAL_TOLERANCE
    return count


def time_metrics(seconds: Mapping[str, float], batch: Batch, *, devices: int) -> dict[str, float]:
    """`timing_s/*`, `timing_per_token_ms/*` and `perf/{total_num_tokens,time_per_step,throughput}`.

    `seconds` maps phases (gen, reward, old_log_prob, ref, values, adv, update_critic, update_actor, update_weights,
    testing, save_checkpoint, step) to their duration; `step` must be there. `devices` counts every accelerator of the
    run, those of the rollout pool included, so throughput is tokens per second per device.

    Raises ValueError when `devices` is not positive.
    """
    if devices < 1:
        raise ValueError(f"perf/throughput needs the number of devices of all pools; got {devices}")
    response_tokens = int(response_lengths(batch).sum())
    tokens = response_tokens + int(prompt_lengths(batch).sum())
    metrics = {f"timing_s/{phase}": float(value) for phase, value in seconds.items()}
    for phase, value in seconds.items():
        per = response_tokens if phase in PER_RESPONSE_TOKEN else tokens
        if phase not in NOT_PER_TOKEN and per:
            metrics[f"timing_per_token_ms/{phase}"] = float(value) * 1000 / per
    metrics["perf/total_num_tokens"] = float(tokens)
    metrics["perf/time_per_step"] = float(seconds["step"])
    metrics["perf/throughput"] = tokens / max(seconds["step"], 1e-9) / devices
    return metrics


def training_flops(lengths: Sequence[int] | np.ndarray, *, parameters: int, layers: int, attention_width: int) -> float:
    """Floating-point operations one forward and backward pass over sequences of these lengths needs.

    6 per parameter and token, plus causal attention: 6 · layers · attention_width · length². `parameters` counts the
    weights that are multiplied with every token: all of them, less the input embedding, plus the output head (once if
    tied). `attention_width` is heads × head dimension. After Kaplan et al. 2020 (arXiv:2001.08361), appendix B, and
    PaLM (arXiv:2204.02311), appendix B, with the causal half of attention counted. Recomputation does not count.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    return float(6 * parameters * lengths.sum() + 6 * layers * attention_width * (lengths**2).sum())


def mfu_metrics(
    flops: Mapping[str, float], seconds: Mapping[str, float], *, peak_flops: float | None, devices: int
) -> dict[str, float]:
    """`perf/mfu/<name>` = flops / (seconds × devices × peak): model FLOP/s utilisation of the trainer's devices.

    `flops` and `seconds` are keyed by "actor", "critic". `peak_flops` is one device's, per second; where it is unknown
    (None) there are no metrics, rather than a 0.
    """
    if peak_flops is None:
        return {}
    return {f"perf/mfu/{name}": flops[name] / (seconds[name] * devices * peak_flops) for name in flops}


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    if not values.size:
        return {}
    return {
        f"{name}/mean": float(values.mean(dtype=np.float64)),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _lengths(name: str, lengths: np.ndarray, limit: int) -> dict[str, float]:
    if not lengths.size:
        return {}
    return {**_spread(name, lengths), f"{name}/clip_ratio": float((lengths >= limit).mean())}
