"""Attention of few tokens over a long KV cache: one kernel over chunks of the cache, one that combines their results.

Every KV head's query heads and tokens are rows of 16 to a program. The cache is divided into chunks of fixed size from
its first slot on, and a program computes one chunk, so that a row's bits depend neither on other rows nor on how many
programs run. What the chunks cover is read from the tokens' slots, on the device: a captured graph serves any length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.models.triton_kernels.elementwise import BLOCK_ROWS, compute_dtype, power_of_two

CHUNK, CHUNKS = 64, 64  # slots of a chunk, which doubles beyond this number of chunks
BLOCK_SLOTS, BLOCK_BYTES = 64, 2**15  # most slots of a step, and most bytes of their keys, so that they fit in 99 KiB
WARPS, STAGES = 4, 2


def chunk_of(slots: int) -> int:
    """Return the slots of a chunk for a cache of `slots` slots per row."""
    return max(CHUNK, power_of_two(triton.cdiv(slots, CHUNKS)))


def slots_of_step(dims: int, size: int) -> int:
    """Return the slots of a step for heads of `dims` values of `size` bytes each."""
    return min(BLOCK_SLOTS, BLOCK_BYTES // (dims * size))


@triton.jit
def chunk_kernel(
    q, keys, values, slots, mask, out, largest, total, n, kv_len, chunks, scaling, row_start, mask_batch,
    key_row, key_head, key_slot, key_dim, value_row, value_head, value_slot,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    COMPUTE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Attend 16 rows of one KV head to one chunk: write unnormalised outputs, largest scores and sums of weights."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    sequence, kv_head = head // KV_HEADS, head % KV_HEADS
    tokens = tl.arange(0, BLOCK_T)
    every = tl.load(slots + sequence * n + tokens, mask=tokens < n, other=0)
    last = tl.max(tl.where(every < kv_len, every, 0), 0)
    if chunk * CHUNK <= last:
        rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)  # row = query head of the group * n + token
        in_rows, dims = rows < GROUP * n, tl.arange(0, BLOCK_D)
        in_dims, token = dims < DIM, rows % n
        own = tl.load(slots + sequence * n + token)
        own = tl.where(own < kv_len, own, 0)
        at = (head * GROUP * n + rows)[:, None] * DIM + dims[None, :]
        queries = tl.load(q + at, mask=in_rows[:, None] & in_dims[None, :], other=0.0).to(COMPUTE)
        row = (row_start + sequence).to(tl.int64)
        k_head = keys + row * key_row + kv_head * key_head
        v_head = values + row * value_row + kv_head * value_head
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        high = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weights = tl.zeros((BLOCK_M,), tl.float32)
        for step in range(0, CHUNK, BLOCK_S):
            slot = chunk * CHUNK + step + tl.arange(0, BLOCK_S)
            there = slot < kv_len
            if MASKED:
                line = mask + (sequence * mask_batch * n + token)[:, None] * kv_len
                seen = tl.load(line + slot[None, :], mask=in_rows[:, None] & there[None, :], other=0) != 0
            else:
                seen = (slot[None, :] <= own[:, None]) & there[None, :]
                if WINDOW > 0:
                    seen = seen & (slot[None, :] > own[:, None] - WINDOW)
            inside = there[:, None] & in_dims[None, :]
            key = tl.load(k_head + slot[:, None] * key_slot + dims[None, :] * key_dim, mask=inside, other=0.0)
            value = tl.load(v_head + slot[:, None] * value_slot + dims[None, :], mask=inside, other=0.0)
            scores = tl.dot(queries, tl.trans(key.to(COMPUTE)), input_precision="ieee") * scaling
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(high, tl.max(scores, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
            shrunk, p = tl.exp(high - finite), tl.exp(scores - finite[:, None])
            weights = weights * shrunk + tl.sum(p, 1)
            p = p.to(values.dtype.element_ty).to(COMPUTE)
            acc = acc * shrunk[:, None] + tl.dot(p, value.to(COMPUTE), input_precision="ieee")
            high = higher
        line = (head * GROUP * n + rows) * chunks + chunk
        tl.store(out + line[:, None] * DIM + dims[None, :], acc, mask=in_rows[:, None] & in_dims[None, :])
        tl.store(largest + line, high, mask=in_rows)
        tl.store(total + line, weights, mask=in_rows)


@triton.jit
def combine_kernel(
    parts, largest, total, slots, out, n, kv_len, chunks, out_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Combine the chunks of one row, and write it to its token's part of `out`."""
    head, row = tl.program_id(0), tl.program_id(1)
    sequence, kv_head = head // KV_HEADS, head % KV_HEADS
    tokens, dims, chunk = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    every = tl.load(slots + sequence * n + tokens, mask=tokens < n, other=0)
    last = tl.max(tl.where(every < kv_len, every, 0), 0)
    known = (chunk < chunks) & (chunk * CHUNK <= last)
    line = (head * GROUP * n + row) * chunks + chunk
    high = tl.load(largest + line, mask=known, other=float("-inf"))
    share = tl.exp(high - tl.max(high, 0))
    weight = tl.sum(share * tl.load(total + line, mask=known, other=0.0), 0)
    inside = known[:, None] & (dims < DIM)[None, :]
    part = tl.load(parts + line[:, None] * DIM + dims[None, :], mask=inside, other=0.0)
    done = tl.sum(part * share[:, None], 0) / weight
    query_head = kv_head * GROUP + row // n
    to = out + (sequence * n + row % n) * out_stride + query_head * DIM + dims
    tl.store(to, done.to(out.dtype.element_ty), mask=dims < DIM)


def decode_attention(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    out: Tensor,
    *,
    scaling: float,
    kv_len: int,
    mask: Tensor | None = None,
    window: int | None = None,
    first_row: int = 0,
) -> None:
    """Write the attention output of tokens `[B, n]` to `out` `[B * n, H * d]`.

    `q` `[B * H_kv, G, n, d]` is contiguous. `cache` are a layer's keys and values `[rows, H_kv, slots, d]`, of which
    the B rows from `first_row` on are read, up to slot `kv_len`. `slots` `[B, n]` are the tokens' own slots. `mask`
    `[1 or B, n, kv_len]` is true where a token sees a slot, no later one than the largest of `slots`; without a mask, a
    token sees the slots up to its own, of which only the last `window` if that is given. Every token sees a slot. One
    whose slot is not below `kv_len` is padding, for which no slots are read that others of its sequence do not need.
    """
    keys, values = cache
    (batch, n), (_, group, _, dim), kv_heads = slots.shape, q.shape, keys.shape[1]
    chunk = chunk_of(keys.shape[2])
    chunks, heads = triton.cdiv(kv_len, chunk), batch * kv_heads
    parts = torch.empty(heads, group * n, chunks, dim, dtype=torch.float32, device=q.device)
    largest, total = torch.empty(2, heads, group * n, chunks, dtype=torch.float32, device=q.device).unbind(0)
    blocks = {"BLOCK_D": power_of_two(dim), "BLOCK_T": power_of_two(n, 1)}
    shape = {"KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "CHUNK": chunk}
    with torch.cuda.device_of(q):
        chunk_kernel[(heads, chunks, triton.cdiv(group * n, BLOCK_ROWS))](
            q, keys, values, slots, None if mask is None else mask.view(torch.uint8), parts, largest, total,
            n, kv_len, chunks, scaling, first_row, int(mask is not None and len(mask) > 1),
            *keys.stride(), *values.stride()[:3], **shape, WINDOW=window or 0, MASKED=mask is not None,
            COMPUTE=compute_dtype(q.dtype), BLOCK_M=BLOCK_ROWS, **blocks,
            BLOCK_S=slots_of_step(blocks["BLOCK_D"], keys.element_size()),
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        combine_kernel[(heads, group * n)](
            parts, largest, total, slots, out, n, kv_len, chunks, out.stride(0),
            **shape, BLOCK_C=power_of_two(chunks, 1), **blocks, num_warps=4,
        )  # fmt: skip
