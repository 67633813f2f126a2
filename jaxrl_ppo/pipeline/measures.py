"""The scores of a validation from its samples, as verl names them."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_ppo.algorithms.validation import validation_metrics
from jaxrl_ppo.schema.records import Prompt, Sample


def validation_scores(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> dict[str, float]:
    """`val-core/*` and `val-aux/*`; `prompts[i]` is the question of `samples[i]`.

    Parts of the reward count where every sample of the data source has them; `pred`, a reward function's extracted
    answer, gives maj@k.
    """
    names = set.intersection(*(set(sample.reward_parts) for sample in samples)) - {"score"}
    values: dict[str, Sequence[float]] = {"reward": [sample.reward or 0.0 for sample in samples]}
    values |= {name: [sample.reward_parts[name] for sample in samples] for name in sorted(names)}
    return validation_metrics(
        [prompt.data_source for prompt in prompts], [prompt.ordinal for prompt in prompts], values
    )
