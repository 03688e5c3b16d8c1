"""RMSNorm of the residual stream, and RoPE with the writing of keys and values, as one kernel each.

Also the dtypes of products and the sizes of blocks, which the other kernels use. Triton launches on the thread's
current device, whichever device the tensors are on. Kernels are therefore launched within `torch.cuda.device_of`, which
makes a tensor's device the current one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = 16  # rows of a program, padded: the fewest that tensor cores multiply, so that all widths run the same way
ROUNDED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of products' operands for rows of `dtype`.

    Triton's interpreter cannot multiply bfloat16: it multiplies the same values in float32.
    """
    return tl.float32 if triton.knobs.runtime.interpret else ROUNDED[dtype]


def power_of_two(n: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least `n` and `least`."""
    return max(triton.next_power_of_2(n), least)


@triton.jit
def norm_kernel(
    x, add, weight, out, x_stride, add_stride, out_stride, eps,
    WIDTH: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise one row of `x`, to which the row of `add` is added first, in place, if `ADDED`."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < WIDTH
    stream = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        stream = stream + tl.load(add + row * add_stride + at, mask=inside, other=0.0).to(tl.float32)
        rounded = stream.to(x.dtype.element_ty)
        tl.store(x + row * x_stride + at, rounded, mask=inside)
        stream = rounded.to(tl.float32)
    normed = stream * (1.0 / tl.sqrt(tl.sum(stream * stream, 0) / WIDTH + eps))
    normed = normed.to(out.dtype.element_ty).to(tl.float32)  # rounded where `transformers` rounds
    scaled = normed * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, add: Tensor | None = None) -> Tensor:
    """Write the RMSNorm of rows `x` `[n, width]` to `out`, and return it; `add` `[n, width]` is added to `x` first."""
    width = x.shape[1]
    with torch.cuda.device_of(x):
        norm_kernel[(len(x),)](
            x, add, weight, out, x.stride(0), 0 if add is None else add.stride(0), out.stride(0), eps,
            WIDTH=width, ADDED=add is not None, BLOCK=power_of_two(width), num_warps=8 if width > 2048 else 4,
        )  # fmt: skip
    return out


@triton.jit
def rope_kernel(
    qkv, cos, sin, partner, positions, slots, q, keys, values, n, row_start, qkv_stride,
    key_row, key_head, key_slot, key_dim, value_row, value_head, value_slot,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate one head of one token, or take a value head as it is, and write it to `q` or to a slot of the cache."""
    token, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    inside = at < DIM
    row, source = token // n, qkv + token * qkv_stride + head * DIM
    slot, cache_row = tl.load(slots + token), (row_start + row).to(tl.int64)
    x = tl.load(source + at, mask=inside, other=0.0)
    if head >= HEADS + KV_HEADS:
        to = values + cache_row * value_row + (head - HEADS - KV_HEADS) * value_head + slot * value_slot
        tl.store(to + at, x, mask=inside)
    else:
        angle = tl.load(positions + token) * DIM + at
        y = tl.load(source + tl.load(partner + at, mask=inside, other=0), mask=inside, other=0.0).to(tl.float32)
        rotated = (x.to(tl.float32) * tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        rotated = rotated.to(tl.float32) + y * tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        rotated = rotated.to(x.dtype)
        if head < HEADS:
            tl.store(q + ((row * HEADS + head) * n + token % n) * DIM + at, rotated, mask=inside)
        else:
            to = keys + cache_row * key_row + (head - HEADS) * key_head + slot * key_slot
            tl.store(to + at * key_dim, rotated, mask=inside)


def rope_and_write(
    qkv: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    first_row: int,
) -> None:
    """Rotate queries and keys, write queries to `q`, and keys and values to the cache.

    `qkv` `[B * n, (H + 2 * H_kv) * d]` are queries, keys and values before RoPE. `tables` are cosines and sines
    `[positions, 1, d]` and the dimension `[d]` that each dimension is rotated with. `positions` and `slots` are
    `[B, n]`, contiguous. `q` `[B * H_kv, G, n, d]` is contiguous. `cache` are a layer's keys and values `[rows, H_kv,
    slots, d]`, of which the B rows from `first_row` on are written.
    """
    (cos, sin, partner), (keys, values) = tables, cache
    n, dim, kv_heads = positions.shape[1], q.shape[-1], keys.shape[1]
    heads = q.shape[0] // len(positions) * q.shape[1]
    with torch.cuda.device_of(qkv):
        rope_kernel[(len(qkv), heads + 2 * kv_heads)](
            qkv, cos, sin, partner, positions, slots, q, keys, values, n, first_row, qkv.stride(0),
            *keys.stride(), *values.stride()[:3],
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK=power_of_two(dim), num_warps=1,
        )  # fmt: skip


def partner_of(partner: Tensor | None, dim: int, device: torch.device) -> Tensor:
    """Return the dimension that each of `dim` dimensions is rotated with, by default the one half of them away."""
    return torch.arange(dim, device=device).roll(dim // 2) if partner is None else partner
