"""What passes between the parts of a run: prompts, samples and a step's batch. Plain data, no behaviour."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray  # int32
    Floats = np.ndarray  # float32


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the data stream.

    `ordinal` counts prompts from the start of the stream, over all epochs; it is never reused, so it names the prompt
    in logs, seeds and checkpoints.
    """

    ordinal: int
    token_ids: tuple[int, ...]
    messages: list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    agent_name: str | None = None  # the agent loop that answers it; None: the configuration's


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a response: its tokens are `start` to `end` (exclusive) of the sample's."""

    role: str  # "assistant": the policy; "tool": the environment
    start: int
    end: int
    calls: tuple[str, ...] = ()  # the tools that answered in it
    failures: int = 0  # how many of those calls failed


@dataclasses.dataclass(slots=True)
class Sample:
    """One response to a prompt, built once by the rollout side; its tokens are never re-encoded from text.

    Arrays have one entry per response token. `mask` is 1 where the policy sampled the token and 0 where the
    environment wrote it. `log_probs` are the engine's, after temperature and truncation. `versions` says which weight
    version (number of actor optimizer steps) produced each token.
    """

    ordinal: int
    index: int
    response_ids: Ints
    mask: Floats
    log_probs: Floats
    versions: Ints
    finish_reason: str  # "stop" or "length"
    reward: float | None = None
    reward_parts: dict[str, float] = dataclasses.field(default_factory=dict)
    reward_labels: dict[str, str] = dataclasses.field(default_factory=dict)  # texts, e.g. `pred`, the answer found
    text: str | None = None
    turns: tuple[Turn, ...] = ()


@dataclasses.dataclass(slots=True)
class Batch:
    """The samples of one step as columns: B samples, responses right-padded to T tokens.

    Samples of one prompt are neighbours and share a `group` id (0 .. number of prompts - 1). Columns that a step does
    not compute stay None.
    """

    prompts: list[Prompt]  # one per group
    group: Ints  # [B]
    response_ids: Ints  # [B, T]
    response_mask: Floats  # [B, T]
    rollout_log_probs: Floats  # [B, T]
    versions: Ints  # [B, T]
    scores: Floats  # [B] the reward function's value
    greedy_scores: Floats | None = None  # [B] that of the greedy response to the sample's prompt (ReMax)
    token_rewards: Floats | None = None  # [B, T]
    old_log_probs: Floats | None = None  # [B, T]
    ref_log_probs: Floats | None = None  # [B, T]
    sum_pi_squared: Floats | None = None  # [B, T] sum over the vocabulary of the old policy's squared probabilities
    values: Floats | None = None  # [B, T]
    advantages: Floats | None = None  # [B, T]
    returns: Floats | None = None  # [B, T]
    importance_weights: Floats | None = None  # [B, T] rollout correction
    kept_mask: Floats | None = None  # [B, T] response_mask without what rollout correction rejected
