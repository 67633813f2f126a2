"""From prompts to requests, and from completions to a step's batch. Plain numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl_ppo.rollout.engine import Completion, Request, SamplingParams
from jaxrl_ppo.schema.records import Batch, Prompt, Sample

TRAINING, VALIDATION = 0, 1  # separate seeds for the two kinds of request


def make_requests(
    prompts: Sequence[Prompt], n: int, sampling: SamplingParams, *, seed: int, purpose: int = TRAINING
) -> list[Request]:
    """`n` requests for each prompt, samples of one prompt next to one another.

    A request's seed is a function of the run's seed, the prompt's ordinal and the sample's index alone: the same
    after a resume, on any replica.
    """
    return [
        Request(
            id=f"{prompt.ordinal}.{index}",
            prompt_ids=tuple(prompt.token_ids),
            seed=int(np.random.SeedSequence([seed, purpose, prompt.ordinal, index]).generate_state(1)[0]),
            sampling=sampling,
        )
        for prompt in prompts
        for index in range(n)
    ]


def make_sample(completion: Completion) -> Sample:
    """The sample that a completed request stands for; without a mask, every token is the policy's own."""
    ordinal, index = completion.request_id.split(".")
    return Sample(
        ordinal=int(ordinal),
        index=int(index),
        response_ids=completion.token_ids,
        mask=np.ones(len(completion.token_ids), np.float32) if completion.mask is None else completion.mask,
        log_probs=completion.log_probs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        turns=completion.turns,
    )


def padded_length(longest: int, limit: int) -> int:
    """The smallest power of two from 16 that holds `longest` tokens, at most `limit`: few shapes, few compilations."""
    return min(limit, max(16, 1 << (max(longest, 1) - 1).bit_length()))


def ordered(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
    """The samples in the order of their prompts, then of their index, whenever each of them finished."""
    position = {prompt.ordinal: i for i, prompt in enumerate(prompts)}
    return sorted(samples, key=lambda sample: (position[sample.ordinal], sample.index))


def make_batch(prompts: Sequence[Prompt], samples: Sequence[Sample], response_length: int) -> Batch:
    """`samples`, in the order of `ordered` and each with its reward, as columns; responses right-padded."""
    position = {prompt.ordinal: i for i, prompt in enumerate(prompts)}
    length = padded_length(max((len(s.response_ids) for s in samples), default=0), response_length)

    def column(values: Sequence[np.ndarray], dtype: type) -> np.ndarray:
        out: np.ndarray = np.zeros((len(samples), length), dtype)
        for row, value in zip(out, values):
            row[: len(value)] = value
        return out

    return Batch(
        prompts=list(prompts),
        group=np.array([position[s.ordinal] for s in samples], np.int32),
        response_ids=column([s.response_ids for s in samples], np.int32),
        response_mask=column([s.mask for s in samples], np.float32),
        rollout_log_probs=column([s.log_probs for s in samples], np.float32),
        versions=column([s.versions for s in samples], np.int32),
        scores=np.array([s.reward for s in samples], np.float32),
    )
