"""Packing: every target is there once with the right context, within the limits, for any batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_ppo.schema.records import Batch, Prompt
from jaxrl_ppo.training.packing import PackingError, PackingLimits, ladder, pack

KEY = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


def batch_of(prompt_lengths, group, lengths, rng, holes=0.0):
    """Every token of the batch has an id of its own, so that contexts can be compared."""
    width = max([*lengths, 1]) + 1
    ids = np.arange(len(lengths) * width, dtype=np.int32).reshape(-1, width)
    starts = ids.size + np.cumsum([0, *prompt_lengths])
    prompts = [
        Prompt(1000 + i, tuple(range(starts[i], starts[i + 1])), [], "", None, {}) for i in range(len(prompt_lengths))
    ]
    mask = (np.arange(width) < np.asarray(lengths)[:, None]).astype(np.float32)
    mask[rng.random(mask.shape) < holes] = 0
    zeros = np.zeros_like(mask)
    return Batch(prompts, np.asarray(group, np.int32), ids, mask, zeros, ids, zeros[:, 0])


def context(step, row, column):
    """The tokens, in order of position, that a hidden state sees: the attention rule of `Decoder.hidden`."""
    segments = step.segment_ids[row]
    branches = np.zeros_like(segments) if step.branch_ids is None else step.branch_ids[row]
    seen = (np.arange(len(segments)) <= column) & (segments == segments[column]) & (segments != 0)
    seen &= (branches == 0) | (branches == branches[column])
    order = np.argsort(step.positions[row][seen])
    assert step.positions[row][seen][order].tolist() == list(range(seen.sum()))
    return step.tokens[row][seen][order].tolist()


@st.composite
def cases(draw):
    prompts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    group = sorted(draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=14)))
    lengths = [draw(st.integers(0, 20)) for _ in group]
    limits = PackingLimits(
        groups=draw(st.sampled_from([1, 2, 3])),
        tokens=draw(st.sampled_from([32, 40, 100, 1000])),
        tokens_key=KEY,
        share_prefix=draw(st.booleans()),
        attention_cost=draw(st.sampled_from([0.0, 1e-3, 0.1])),
        multiple=draw(st.sampled_from([1, 8, 16])),
    )
    if draw(st.booleans()):
        limits = dataclasses.replace(limits, tokens=None, sequences=draw(st.integers(1, 5)))
    return batch_of(prompts, group, lengths, np.random.default_rng(draw(st.integers(0, 99))), 0.2), limits


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_target_is_predicted_once_from_its_own_context(case):
    batch, limits = case
    samples = np.arange(len(batch.group))
    packing = pack(batch, samples, limits)
    found = np.zeros(batch.response_mask.shape, int)
    for step in packing.steps:
        pieces, slots = step.source.shape
        rows, length = step.tokens.shape
        assert pieces == limits.groups
        assert rows % pieces == 0
        assert (step.branch_ids is not None) == limits.share_prefix
        per_piece = rows // pieces
        if limits.tokens is not None:
            assert per_piece * length <= limits.tokens
        for piece in range(pieces):
            used = step.sample[piece] >= 0
            if limits.sequences is not None:
                assert len(np.unique(step.sample[piece][used])) <= limits.sequences
            # Numbers of the samples: one each, from 0, fewer than slots.
            pairs = set(zip(step.sample[piece][used].tolist(), step.sequence[piece][used].tolist()))
            assert len({sample for sample, _ in pairs}) == len({number for _, number in pairs}) == len(pairs)
            assert all(0 <= number < slots for _, number in pairs)
            for slot in np.flatnonzero(used):
                sample, offset = int(step.sample[piece, slot]), int(step.offset[piece, slot])
                found[sample, offset] += 1
                assert step.target[piece, slot] == batch.response_ids[sample, offset]
                row, column = divmod(int(step.source[piece, slot]), length)
                expected = [*batch.prompts[batch.group[sample]].token_ids, *batch.response_ids[sample, :offset]]
                assert context(step, piece * per_piece + row, column) == expected
    np.testing.assert_array_equal(found, batch.response_mask > 0)
    assert packing.slots == sum(step.tokens.size for step in packing.steps)
    assert packing.used == sum((step.segment_ids > 0).sum() for step in packing.steps)
    assert len({step.tokens.shape + step.source.shape for step in packing.steps}) <= 1


@settings(max_examples=50, deadline=None)
@given(cases(), st.integers(0, 9))
def test_columns_go_out_and_come_back(case, seed):
    batch, limits = case
    column = np.random.default_rng(seed).normal(size=batch.response_mask.shape).astype(np.float32)
    column[batch.response_mask == 0] = np.nan
    back = np.full_like(column, np.nan)
    for step in pack(batch, range(len(batch.group)), limits).steps:
        taken = step.take(column)
        assert np.isfinite(taken).all()
        assert (taken[step.sample < 0] == 0).all()
        step.put(taken, back)
    np.testing.assert_array_equal(back, column)


def test_only_the_given_samples_are_packed():
    batch = batch_of([3, 4], [0, 0, 1, 1], [5, 6, 7, 8], np.random.default_rng(0))
    steps = pack(batch, [1, 2], PackingLimits(1, 64, KEY)).steps
    assert sorted(np.unique(np.concatenate([step.sample for step in steps]))) == [-1, 1, 2]


def test_a_shared_prompt_is_in_a_row_once_and_a_group_that_is_too_long_repeats_it():
    batch = batch_of([10], [0] * 4, [9] * 4, np.random.default_rng(0))
    assert pack(batch, range(4), PackingLimits(1, 100, KEY, multiple=1)).used == 10 + 4 * 8
    small = pack(batch, range(4), PackingLimits(1, 26, KEY, multiple=1))
    assert small.used == 2 * 10 + 4 * 8
    apart = pack(batch, range(4), PackingLimits(1, 100, KEY, multiple=1, share_prefix=False))
    assert apart.used == 4 * 10 + 4 * 8


def test_long_rows_are_cut_where_attention_is_dear():
    batch = batch_of([10] * 16, range(16), [14] * 16, np.random.default_rng(0))
    assert pack(batch, range(16), PackingLimits(1, 1024, KEY, attention_cost=0.1)).steps[0].tokens.shape == (16, 32)
    assert pack(batch, range(16), PackingLimits(1, 1024, KEY, attention_cost=0.0)).steps[0].tokens.shape[1] > 32


def test_a_sample_over_the_limit_names_its_prompt_and_the_key():
    batch = batch_of([3, 30], [0, 1], [5, 20], np.random.default_rng(0))
    with pytest.raises(PackingError, match=rf"prompt 1001: 30 prompt tokens and a response of 20 .*{KEY}=40"):
        pack(batch, range(2), PackingLimits(1, 40, KEY))


def test_nothing_to_predict_packs_to_nothing():
    batch = batch_of([3], [0, 0], [0, 0], np.random.default_rng(0))
    packing = pack(batch, range(2), PackingLimits(1, 40, KEY))
    assert (packing.steps, packing.padding_waste) == ([], 0.0)


def test_targets_are_balanced_over_devices():
    rng = np.random.default_rng(0)
    batch = batch_of(rng.integers(5, 60, 64).tolist(), np.repeat(np.arange(64), 8), rng.integers(1, 200, 512), rng)
    packing = pack(batch, range(512), PackingLimits(8, 4096, KEY, attention_cost=1e-3))
    loads = np.array([(step.sample >= 0).sum(axis=1) for step in packing.steps])
    assert (loads.max(axis=1) <= 1.1 * loads.mean(axis=1)).all()
    assert packing.padding_waste < 0.1


def test_shapes_come_from_a_short_ladder():
    sizes = {ladder(size, 16) for size in range(1, 16385)}
    assert len(sizes) <= 45
    assert all(size % 16 == 0 for size in sizes)
    assert all(size <= ladder(size, 16) <= max(1.25 * size, size + 15) for size in range(1, 16385))
