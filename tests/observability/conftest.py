"""Batches and samples small enough to reckon by hand."""

import numpy as np
import pytest

from jaxrl_ppo.schema.records import Batch, Prompt, Sample


@pytest.fixture
def prompts():
    return [
        Prompt(7, (1, 2, 3), [{"role": "user", "content": "a"}], "sums", "4", {}),
        Prompt(8, (1, 2, 3, 4, 5), [{"role": "user", "content": "b"}], "products", "6", {}),
    ]


@pytest.fixture
def batch(prompts):
    """Two prompts, two samples each; the first group's scores are equal. Sample 2 has a tool's tokens inside."""
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], np.float32)
    return Batch(
        prompts=prompts,
        group=np.array([0, 0, 1, 1], np.int32),
        response_ids=np.arange(16, dtype=np.int32).reshape(4, 4),
        response_mask=mask,
        rollout_log_probs=np.log(np.full((4, 4), 0.5, np.float32)),
        versions=np.zeros((4, 4), np.int32),
        scores=np.array([0.5, 0.5, 1.0, 0.0], np.float32),
    )


@pytest.fixture
def samples(batch):
    rows = []
    for number, length in enumerate((2, 4, 3, 0)):
        rows.append(
            Sample(
                ordinal=batch.prompts[batch.group[number]].ordinal,
                index=number % 2,
                response_ids=batch.response_ids[number, :length],
                mask=batch.response_mask[number, :length],
                log_probs=batch.rollout_log_probs[number, :length],
                versions=np.array([3, 3, 4, 4], np.int32)[:length],
                finish_reason="stop",
                reward=float(batch.scores[number]),
                reward_parts={"format": 1.0},
            )
        )
    return rows
