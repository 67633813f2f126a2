"""From prompts to requests, and from completions to a step's batch. Plain numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_ppo.rollout.engine import Completion, Request, SamplingParams
from jaxrl_ppo.schema.records import Batch, Prompt, Sample

TRAINING, VALIDATION, CONTRACT = 0, 1, 2  # separate seeds for the kinds of request


def make_requests(
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingParams,
    *,
    seed: int,
    purpose: int = TRAINING,
    greedy: bool = False,
) -> list[Request]:
    """`n` requests for each prompt, samples of one prompt next to one another; with `greedy` one more, number n.

    A request's seed is a function of the run's seed, the prompt's ordinal and the sample's index alone: the same
    after a resume, on any replica.
    """
    return [
        Request(
            id=f"{prompt.ordinal}.{index}",
            prompt_ids=tuple(prompt.token_ids),
            seed=int(np.random.SeedSequence([seed, purpose, prompt.ordinal, index]).generate_state(1)[0]),
            sampling=sampling if index < n else dataclasses.replace(sampling, temperature=0.0),
        )
        for prompt in prompts
        for index in range(n + greedy)
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


class RewardPartError(ValueError):
    """A number that the configuration asks of the reward function, and that it does not return."""


def part_columns(samples: Sequence[Sample], names: Sequence[str]) -> np.ndarray:
    """The parts of the samples' rewards called `names`, [B, K] float32; `score` is the reward itself.

    A sample without any parts is one whose reward failed: its parts are 0, as its reward is. Raises RewardPartError
    when a sample has parts, and not one of these, or none has any.
    """
    if not any(sample.reward_parts for sample in samples):
        raise RewardPartError(
            f"{', '.join(names)}: the reward function returns no such numbers, only the score; it must return a dict"
        )
    columns = np.zeros((len(samples), len(names)), np.float32)
    for row, sample in zip(columns, samples):
        if sample.reward_parts:
            parts = {"score": sample.reward or 0.0, **sample.reward_parts}
            if missing := [name for name in names if name not in parts]:
                raise RewardPartError(
                    f"the reward of prompt {sample.ordinal}, sample {sample.index}, has no {', '.join(missing)}; the "
                    f"reward function returned {', '.join(sorted(parts))}"
                )
            row[:] = [parts[name] for name in names]
    return columns


def padded_length(longest: int, limit: int) -> int:
    """The smallest power of two from 16 that holds `longest` tokens, at most `limit`: few shapes, few compilations."""
    return min(limit, max(16, 1 << (max(longest, 1) - 1).bit_length()))


def ordered(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
    """The samples in the order of their prompts, then of their index, whenever each of them finished."""
    position = {prompt.ordinal: i for i, prompt in enumerate(prompts)}
    return sorted(samples, key=lambda sample: (position[sample.ordinal], sample.index))


def split_greedy(samples: Sequence[Sample], n: int) -> tuple[list[Sample], dict[int, float]]:
    """The samples to train on, and the scores of the greedy ones, which are number `n`, by their prompts' ordinals."""
    greedy = {sample.ordinal: sample.reward or 0.0 for sample in samples if sample.index == n}
    return [sample for sample in samples if sample.index < n], greedy


def make_batch(
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    response_length: int,
    greedy: Mapping[int, float] | None = None,
) -> Batch:
    """`samples`, in the order of `ordered` and each with its reward, as columns; responses right-padded.

    `greedy` are the scores of greedy responses by prompt, where those were generated.
    """
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
        greedy_scores=np.array([greedy[s.ordinal] for s in samples], np.float32) if greedy else None,
    )
