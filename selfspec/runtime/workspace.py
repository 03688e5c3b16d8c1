"""Workspaces: the tensors that a pass computes in, allocated once for each shape, together with their views.

A pass of a small model takes as long to create tensors and views as to compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.models.families.base import Sizes


class Scratch:
    """The workspace of tokens `[B, n]`, N = B * n rows. `stream` `[N, D]` is the residual stream, changed in place.

    `stream_with_eps` `[N, D + 1]` is the stream plus a column of sqrt(D * eps). RMSNorm divides each row of the stream
    by the Euclidean norm of the same row of `stream_with_eps`, divided by sqrt(D). `qkv` has the views `qk` `[N, H +
    H_kv, d]`, before RoPE, and `v`. `rotated` is `qk` after RoPE, with the view `k`. `q` holds the queries of `rotated`
    `[B * H_kv, G, n, d]`: a view if N is 1, else a copy that `gather_q` makes. If N is 1, `single_row` is the pair of
    `qk` and `rotated` as `[H + H_kv, d]`, else None. `k` and `v` are `[B, n, H_kv, d]`; `k_to_write` and `v_to_write`
    are the same as `[B, H_kv, n, d]`. `attention_out` `[N, H * d]` is attention's output before its output projection.
    """

    def __init__(self, sizes: Sizes, batch: int, n: int, device: torch.device) -> None:
        s, rows = sizes, batch * n
        self.batch, self.n, self.device = batch, n, device
        group = s.heads // s.kv_heads

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=s.dtype, device=device)

        self.stream_with_eps = torch.full((rows, s.hidden + 1), (s.hidden * s.eps) ** 0.5, dtype=s.dtype, device=device)
        self.stream = self.stream_with_eps.narrow(1, 0, s.hidden)
        self.normed = empty(rows, s.hidden)
        qk_heads = s.heads + s.kv_heads
        self.qkv = empty(rows, (qk_heads + s.kv_heads) * s.head_dim)
        heads = self.qkv.view(rows, -1, s.head_dim)
        self.qk = heads.narrow(1, 0, qk_heads)
        self.v = heads.narrow(1, qk_heads, s.kv_heads).view(batch, n, s.kv_heads, s.head_dim)
        self.rotated = empty(rows, qk_heads, s.head_dim)
        self.single_row = (self.qk[0], self.rotated[0]) if rows == 1 else None
        self.k = self.rotated.narrow(1, s.heads, s.kv_heads).view(batch, n, s.kv_heads, s.head_dim)
        self.k_to_write, self.v_to_write = self.k.transpose(1, 2), self.v.transpose(1, 2)
        # One KV head serves `group` query heads, whose rows are adjacent: [B * H_kv, G * n, d].
        q = self.rotated.narrow(1, 0, s.heads).view(batch, n, s.kv_heads, group, s.head_dim).permute(0, 2, 3, 1, 4)
        self._from = q if rows > 1 else None
        self.q = (empty(*q.shape) if rows > 1 else q).flatten(0, 1)  # [B * H_kv, G, n, d]
        self.q_rows = self.q.flatten(1, 2)  # [B * H_kv, G * n, d]
        self.attention_out = empty(rows, s.heads * s.head_dim)
        self._to = self.attention_out.view(batch, n, s.kv_heads, group, s.head_dim).permute(0, 2, 3, 1, 4)
        self.out = self._to.flatten(0, 1).flatten(1, 2) if rows == 1 else None
        self.gate_up = empty(rows, 2 * s.intermediate)
        self.gate, self.up = self.gate_up.chunk(2, -1)
        self.activated = empty(rows, s.intermediate)

    def copy_stream(self) -> Tensor:
        """Return a copy of the residual stream, `[B, n, D]`."""
        return self.stream.clone().view(self.batch, self.n, -1)

    def gather_q(self) -> None:
        """Copy the queries in `rotated` to `q`, unless `q` is a view of it (a single row)."""
        if self._from is not None:
            self.q.view(self._from.shape).copy_(self._from)

    def store_attention(self, out: Tensor) -> None:
        """Copy attention's output `[B * H_kv, G * n, d]` or `[B * H_kv, G, n, d]` to `attention_out`."""
        self._to.copy_(out.reshape(self._to.shape))


class ScratchPool:
    """A cache of workspaces for passes over few tokens; larger workspaces are allocated for each pass."""

    MAX_CACHED_ROWS, MAX_CACHED = 64, 24

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._cached: dict[Any, Scratch] = {}

    def get(self, batch: int, n: int, device: torch.device) -> Scratch:
        """Return a workspace for tokens `[batch, n]`, whose contents are those of an earlier pass or undefined."""
        key = (batch, n, device)
        scratch = self._cached.get(key)
        if scratch is None:
            scratch = Scratch(self._sizes, batch, n, device)
            if batch * n <= self.MAX_CACHED_ROWS:
                if len(self._cached) >= self.MAX_CACHED:
                    self._cached.clear()
                self._cached[key] = scratch
        return scratch

    def moved(self, scratch: Scratch, device: torch.device) -> Scratch:
        """Return a workspace on another device, with a copy of the residual stream of `scratch`."""
        there = self.get(scratch.batch, scratch.n, device)
        there.stream.copy_(scratch.stream)
        return there
