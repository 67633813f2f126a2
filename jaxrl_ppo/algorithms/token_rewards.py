"""From a sample's score to its token rewards: where the score sits, and DAPO's penalty on overlong responses."""

from __future__ import annotations

import numpy as np


def place_scores(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Token rewards [B, T] float32: each score [B] on the last token of its row of `mask` [B, T], 0 elsewhere.

    A response without such a token gets no reward; its score counts in the metrics only.
    """
    counted = np.asarray(mask) > 0
    rewards = np.zeros(counted.shape, np.float32)
    rows = np.flatnonzero(counted.any(axis=-1))
    last = counted.shape[-1] - 1 - np.argmax(counted[rows, ::-1], axis=-1)
    rewards[rows, last] = np.asarray(scores, np.float32)[rows]
    return rewards


def overlong_penalty(lengths: np.ndarray, max_length: int, buffer: int, factor: float) -> np.ndarray:
    """What is added to the scores of long responses, [B] float32, from 0 down to -factor at `max_length` tokens.

    DAPO's soft overlong punishment, Yu et al. 2025, arXiv 2503.14476: it grows over the last `buffer` tokens before
    `max_length`. `lengths` [B] is in tokens. Raises ValueError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"reward.reward_kwargs.overlong_buffer_cfg.len is {buffer}, not from 1 to max_resp_len ({max_length})"
        )
    exceeded = np.asarray(lengths, np.float32) - (max_length - buffer)
    return np.minimum(-exceeded / buffer * factor, 0).astype(np.float32)
