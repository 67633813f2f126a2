"""Attention kernels against the formula in float64: segments, branches, windows, soft caps, gradients."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_ppo.models import kernels
from jaxrl_ppo.models.attention import Rows, causal_attention, mask_bias, packed_mask
from jaxrl_ppo.models.kernels import KernelError, check_kernel, row_attention, splash_attention

LENGTH, HEADS, KV_HEADS, WIDTH, SCALE = 150, 4, 2, 16, 0.3
interpreted = functools.partial(splash_attention, interpret=True)


def packed(branches: bool) -> Rows:
    """Two rows of two segments and padding; with branches, each segment is a prompt with two responses."""
    positions, segments, branch = (np.zeros((2, LENGTH), np.int32) for _ in range(3))
    for row, lengths in enumerate([(60, 80), (33, 100)]):
        start = 0
        for number, size in enumerate(lengths, 1):
            here = slice(start, start + size)
            segments[row, here], positions[row, here] = number, np.arange(size)
            if branches:
                prompt, half = size // 3, size // 3
                branch[row, start + prompt : start + size] = 2
                branch[row, start + prompt : start + prompt + half] = 1
                positions[row, start + prompt + half : start + size] -= half
            start += size
    return Rows(jnp.asarray(positions), jnp.asarray(segments), jnp.asarray(branch) if branches else None)


def formula(operands, rows, window, soft_cap, weight):
    """Attention and its gradients with respect to sum(output * weight), token by token, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in operands)
    out, grads = np.zeros_like(query), [np.zeros_like(x) for x in (query, key, value)]
    positions, segments = np.asarray(rows.positions), np.asarray(rows.segment_ids)
    branch = np.zeros_like(segments) if rows.branch_ids is None else np.asarray(rows.branch_ids)
    for r, i in zip(*np.nonzero(segments)):
        seen = [
            j
            for j in range(i + 1)
            if segments[r, j] == segments[r, i]
            and branch[r, j] in (0, branch[r, i])
            and (window is None or positions[r, i] - positions[r, j] < window)
        ]
        for h in range(HEADS):
            k = h * KV_HEADS // HEADS
            scores = key[r, seen, k] @ query[r, i, h] * SCALE
            slope = 1.0
            if soft_cap is not None:
                bent = np.tanh(scores / soft_cap)
                scores, slope = soft_cap * bent, 1 - bent**2
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[r, i, h] = weights @ value[r, seen, k]
            pull = value[r, seen, k] @ weight[r, i, h]
            inner = weights * (pull - weights @ pull) * slope * SCALE
            grads[0][r, i, h] = inner @ key[r, seen, k]
            grads[1][r, seen, k] += np.outer(inner, query[r, i, h])
            grads[2][r, seen, k] += np.outer(weights, weight[r, i, h])
    return out, grads


@pytest.mark.parametrize(
    ("run", "branches", "window", "soft_cap"),
    [
        ("chunks", True, 20, 2.0),
        ("bias", True, None, None),
        ("splash", False, None, None),
        ("splash", False, 20, 2.0),
        ("cudnn", True, 20, None),
    ],
)
def test_outputs_and_gradients_equal_the_formula(monkeypatch, run, branches, window, soft_cap):
    # Without an NVIDIA GPU, JAX's own plain implementation stands behind the same call.
    call = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, implementation, **how: call(*a, **how))
    rows = packed(branches)
    rng = np.random.default_rng(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    operands = [jnp.asarray(rng.normal(size=(2, LENGTH, n, WIDTH)), jnp.float32) for n in heads]
    real = np.asarray(rows.segment_ids != 0)[..., None, None]
    weight = rng.normal(size=operands[0].shape) * real
    expected, expected_grads = formula(operands, rows, window, soft_cap, weight)

    def attend(*operands):
        if run == "splash":
            return interpreted(*operands, rows, scale=SCALE, window=window, soft_cap=soft_cap)
        if run == "cudnn":
            return kernels.cudnn_attention(*operands, rows, scale=SCALE, window=window)
        seen = rows if run == "chunks" else mask_bias(packed_mask(rows, window))
        return causal_attention(*operands, seen, SCALE, window, soft_cap)

    def loss(*operands):
        out = attend(*operands)
        return jnp.sum(out * weight), out

    grads, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*operands)
    np.testing.assert_allclose(out * real, expected, rtol=1e-4, atol=1e-5)
    for grad, wanted in zip(grads, expected_grads):
        np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_a_kernel_that_lets_segments_see_one_another_is_caught(monkeypatch):
    sizes = types.SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=16, query_scale=0.25)

    def careless(query, key, value, rows, **how):
        return interpreted(query, key, value, Rows(rows.positions, jnp.ones_like(rows.segment_ids)), **how)

    monkeypatch.setitem(kernels.KERNELS, "splash", interpreted)
    check_kernel("splash", sizes, jnp.float32)
    monkeypatch.setitem(kernels.KERNELS, "splash", careless)
    with pytest.raises(KernelError, match="'splash' differs from the plain one"):
        check_kernel("splash", sizes, jnp.float32)


def test_cudnn_attention_has_no_soft_cap():
    operands = [jnp.zeros((2, LENGTH, n, WIDTH)) for n in (HEADS, KV_HEADS, KV_HEADS)]
    with pytest.raises(ValueError, match="no soft cap"):
        kernels.cudnn_attention(*operands, packed(branches=False), scale=SCALE, soft_cap=1.0)


def test_branches_under_splash_and_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="'splash' cannot share a prompt"):
        row_attention("splash", packed(branches=True), scale=1.0)
    with pytest.raises(ValueError, match=r"'flash' is not known; use xla, splash, cudnn"):
        row_attention("flash", packed(branches=False), scale=1.0)
