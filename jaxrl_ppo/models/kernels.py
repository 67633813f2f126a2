"""Which attention kernel runs, and where: plain XLA, splash on TPU, cuDNN on NVIDIA, on every device of a mesh."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import PartitionSpec

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.models.attention import DENSE_MASK, Rows, causal_attention, mask_bias, packed_mask
from jaxrl_ppo.sharding.layout import Layout

LANES = 128  # a TPU's vector width: splash takes row lengths and blocks in multiples of it
LARGEST_BLOCK = 512

# A kernel on one device: query [R, S, H, hd], key and value [R, S, K, hd], rows, scale, window, soft cap.
Kernel = Callable[..., jax.Array]


class Attention(Protocol):
    """Attention of one forward pass's rows: query [R, S, H, hd], key and value [R, S, K, hd] -> [R, S, H, hd]."""

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, window: int | None = None) -> jax.Array: ...


def row_attention(
    kernel: str,
    rows: Rows,
    *,
    scale: float,
    soft_cap: float | None = None,
    windows: Collection[int | None] = (None,),
    layout: Layout | None = None,
) -> Attention:
    """Attention over `rows` by the kernel called `kernel`, on the devices of `layout` (None: on one).

    `windows` are those that it may be called with.

    On a mesh every device runs the kernel on whole rows for a share of the heads: those of the tensor axis, divided
    once more over the sequence axis. Where rows are split along their tokens, an all-to-all brings the tokens of a
    row's heads together before, and another takes them apart after (DeepSpeed-Ulysses, arXiv:2309.14509). Heads that
    do not divide are padded, or keys and values repeated, which costs time and changes nothing.

    Raises ValueError for an unknown kernel, and for branches under a kernel that cannot have them.
    """
    run = _find(kernel, rows)
    dense = kernel == "xla" and rows.segment_ids.shape[1] <= DENSE_MASK
    # Here and not when first called, which is inside the loop over layers.
    seen = {window: mask_bias(packed_mask(rows, window)) if dense else rows for window in windows}

    def attention(query: jax.Array, key: jax.Array, value: jax.Array, window: int | None = None) -> jax.Array:
        local = functools.partial(run, scale=scale, window=window, soft_cap=soft_cap)
        if layout is None:
            return local(query, key, value, seen[window])
        return _on_mesh(local, query, key, value, seen[window], layout)

    return attention


def takes_branches(kernel: str) -> bool:
    """Whether rows may hold several responses behind one copy of their prompt under this kernel."""
    return kernel != "splash"  # its dynamic mask is equality of segments


def row_multiple(kernel: str) -> int:
    """What row lengths should be multiples of, so that the kernel need not pad."""
    return LANES if kernel == "splash" else 16


class KernelError(RuntimeError):
    """An attention kernel that gives wrong results on this machine."""


def check_kernel(kernel: str, config: DecoderConfig, dtype: Any) -> None:
    """Compare a kernel with the plain one on a packed row of two segments, on this process's first device.

    Kernels have let segments see one another without a word; better to know before a run than by its rewards. Raises
    KernelError, naming the kernel, when outputs or gradients differ by more than `dtype` rounds.
    """
    shapes = [
        (1, 256, heads, config.head_dim) for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ]
    keys = jax.random.split(jax.random.key(0), 4)
    operands = tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes))
    weight = jax.random.normal(keys[3], shapes[0], jnp.float32)
    segments = jnp.asarray(np.repeat([[1, 2, 0]], [100, 130, 26], axis=1).astype(np.int32))
    positions = jnp.asarray(np.concatenate([np.arange(100), np.arange(130), np.zeros(26)])[None].astype(np.int32))
    rows, real = Rows(positions, segments), (segments != 0)[..., None, None]

    def outputs(run: Kernel) -> list[np.ndarray]:
        def loss(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = run(*operands, rows, scale=config.query_scale, soft_cap=None)
            return jnp.sum(out.astype(jnp.float32) * weight * real), out * real

        grads, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*operands)
        return [np.asarray(x, np.float32) for x in (out, *grads)]

    tolerance = 0.05 if jnp.dtype(dtype).itemsize < 4 else 1e-3
    for ours, plain in zip(outputs(KERNELS[kernel]), outputs(_plain)):
        error = np.abs(ours - plain).max() / np.abs(plain).max()
        if not error < tolerance:
            raise KernelError(
                f"the attention kernel {kernel!r} differs from the plain one by {error:.1%} on a packed row here: do "
                "not train with it; another version of JAX or of the device's libraries may mend it"
            )


def _find(kernel: str, rows: Rows) -> Kernel:
    if kernel not in KERNELS:
        raise ValueError(f"attention {kernel!r} is not known; use {', '.join(KERNELS)}")
    if rows.branch_ids is not None and not takes_branches(kernel):
        raise ValueError(f"attention {kernel!r} cannot share a prompt among responses: use 'xla', or no branches")
    return KERNELS[kernel]


def _on_mesh(
    local: Kernel, query: jax.Array, key: jax.Array, value: jax.Array, seen: Rows | jax.Array, layout: Layout
) -> jax.Array:
    rules = layout.rules
    heads = rules.heads + rules.length
    kv_heads, groups = key.shape[2], query.shape[2] // key.shape[2]
    pieces = layout.pieces("heads", "length")
    copies = pieces // math.gcd(kv_heads, pieces)
    if copies > 1:
        query = _pad_groups(query, kv_heads, math.ceil(groups / copies) * copies)
        key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
    by_head, by_row = PartitionSpec(rules.rows, None, heads, None), PartitionSpec(rules.rows)
    run = jax.shard_map(
        local, mesh=layout.mesh, in_specs=(by_head, by_head, by_head, by_row), out_specs=by_head, check_vma=False
    )
    out = run(query, key, value, seen)
    if copies > 1:
        rows, length, _, head_dim = out.shape
        out = out.reshape(rows, length, kv_heads, -1, head_dim)[:, :, :, :groups]
        out = out.reshape(rows, length, kv_heads * groups, head_dim)
    return layout.constrain(out, "rows", "length", "heads", "head_dim")


def _pad_groups(query: jax.Array, kv_heads: int, groups: int) -> jax.Array:
    """[R, S, K * G, hd] -> [R, S, K * groups, hd], zeros behind each key head's own queries."""
    rows, length, _, head_dim = query.shape
    grouped = query.reshape(rows, length, kv_heads, -1, head_dim)
    grouped = jnp.pad(grouped, ((0, 0),) * 3 + ((0, groups - grouped.shape[3]), (0, 0)))
    return grouped.reshape(rows, length, kv_heads * groups, head_dim)


def _plain(query, key, value, seen, *, scale, window=None, soft_cap=None):
    return causal_attention(query, key, value, seen, scale, window, soft_cap)


def splash_attention(query, key, value, rows, *, scale, window=None, soft_cap=None, interpret=False):
    """JAX's block-sparse flash attention for TPU: shapes as in `causal_attention`, segments but no branches.

    Softmax is float32; blocks above the diagonal are skipped, and nothing is of size [S, S], forward or back.
    `interpret` runs it without a TPU, slowly.
    """
    length, heads = query.shape[1:3]
    padded = math.ceil(length / LANES) * LANES
    block = math.gcd(padded, LARGEST_BLOCK)
    mask = (
        splash_mask.CausalMask
        if window is None
        else functools.partial(splash_mask.LocalMask, window_size=(window - 1, 0), offset=0)
    )
    masks = splash_mask.MultiHeadMask([mask((padded, padded))] * heads)
    kernel = splash.make_splash_mha(
        masks,
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )

    def row(query, key, value, segment_ids):
        return kernel(query, key, value, splash.SegmentIds(segment_ids, segment_ids))

    def to_kernel(x):  # [R, S, H, hd] -> [R, H, S padded, hd]
        return jnp.pad(x, ((0, 0), (0, padded - length), (0, 0), (0, 0))).transpose(0, 2, 1, 3)

    segment_ids = jnp.pad(rows.segment_ids, ((0, 0), (0, padded - length)))
    out = jax.vmap(row)(to_kernel(query * scale), to_kernel(key), to_kernel(value), segment_ids)
    return out.transpose(0, 2, 1, 3)[:, :length].astype(query.dtype)


def cudnn_attention(query, key, value, rows, *, scale, window=None, soft_cap=None):
    """cuDNN's flash attention through JAX, in 16-bit types; shapes as in `causal_attention`.

    The rows' mask goes in as a bias [R, S, S], which is right for segments and branches alike: cuDNN's own packed form
    has no branches, and its offsets were wrong for grouped keys for long. Raises ValueError for a soft cap.
    """
    if soft_cap is not None:
        raise ValueError("cuDNN attention has no soft cap: use attention 'xla'")
    mask = packed_mask(rows, window)[:, None] | np.eye(query.shape[1], dtype=bool)  # padding sees itself: no NaN
    return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale, implementation="cudnn")


KERNELS: dict[str, Kernel] = {"xla": _plain, "splash": splash_attention, "cudnn": cudnn_attention}
