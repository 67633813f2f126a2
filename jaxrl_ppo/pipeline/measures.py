"""The scores of a validation from its samples, as verl names them."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_ppo.algorithms.validation import validation_metrics
from jaxrl_ppo.schema.records import Prompt, Sample


def turn_metrics(samples: Sequence[Sample], prefix: str = "") -> dict[str, float]:
    """Turns and tool calls of samples, `num_turns/*` as verl names them; none where every sample is a single turn."""
    turns = [len(sample.turns) for sample in samples]
    if max(turns, default=1) <= 1:
        return {}
    calls = [sum(len(turn.calls) for turn in sample.turns) for sample in samples]
    return {
        f"{prefix}num_turns/mean": sum(turns) / len(turns),
        f"{prefix}num_turns/max": float(max(turns)),
        f"{prefix}num_turns/min": float(min(turns)),
        f"{prefix}tools/calls/mean": sum(calls) / len(calls),
        f"{prefix}tools/failures": float(sum(turn.failures for sample in samples for turn in sample.turns)),
    }


def validation_scores(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> dict[str, float]:
    """`val-core/*` and `val-aux/*`; `prompts[i]` is the question of `samples[i]`.

    Parts of the reward count where every sample of the data source has them; `pred`, a reward function's extracted
    answer, gives maj@k.
    """
    rows: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        rows.setdefault(prompt.data_source, []).append(number)
    metrics: dict[str, float] = {}
    for source, chosen in rows.items():
        own = [samples[number] for number in chosen]
        names = set.intersection(*(set(sample.reward_parts) for sample in own)) - {"score"}
        values: dict[str, Sequence[float]] = {"reward": [sample.reward or 0.0 for sample in own]}
        values |= {name: [sample.reward_parts[name] for sample in own] for name in sorted(names)}
        predictions = [sample.reward_labels.get("pred") for sample in own]
        metrics |= validation_metrics(
            [source] * len(own),
            [prompts[number].ordinal for number in chosen],
            values,
            None if None in predictions else predictions,
        )
    return metrics
