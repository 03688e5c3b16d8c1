"""The tensors that a pass computes in, made once for each width with every view that it needs.

A small model's time goes into making tensors and views as much as into arithmetic. Knows nothing of caches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.models.sizes import Sizes


class Scratch:
    """For `[B, n]` tokens, which are N = B * n rows. `stream` `[N, D]` is the residual stream, changed in place.

    Beside it in memory stands a column of sqrt(D * eps): `longer` `[N, D + 1]` is as long as a norm divides by, times
    sqrt(D). `qkv`'s views are `qk` `[N, H + H_kv, d]` before rope and `v`; `turned` is `qk` after rope, with views of
    `q` and `k`; of a single row, `alone` are `qk` and `turned` `[H + H_kv, d]`. `k` and `v` are `[B, n, H_kv, d]`, and
    to be written `[B, H_kv, n, d]`. `mixed` `[N, H * d]` is what attention gives.
    """

    def __init__(self, sizes: Sizes, batch: int, n: int, device: torch.device) -> None:
        s, rows = sizes, batch * n
        self.batch, self.n, self.device = batch, n, device
        group = s.heads // s.kv_heads

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=s.dtype, device=device)

        self.longer = torch.full((rows, s.hidden + 1), (s.hidden * s.eps) ** 0.5, dtype=s.dtype, device=device)
        self.stream = self.longer.narrow(1, 0, s.hidden)
        self.normed = empty(rows, s.hidden)
        turning = s.heads + s.kv_heads
        self.qkv = empty(rows, (turning + s.kv_heads) * s.head_dim)
        heads = self.qkv.view(rows, -1, s.head_dim)
        self.qk = heads.narrow(1, 0, turning)
        self.v = heads.narrow(1, turning, s.kv_heads).view(batch, n, s.kv_heads, s.head_dim)
        self.turned = empty(rows, turning, s.head_dim)
        self.alone = (self.qk[0], self.turned[0]) if rows == 1 else None
        self.k = self.turned.narrow(1, s.heads, s.kv_heads).view(batch, n, s.kv_heads, s.head_dim)
        self.k_to_write, self.v_to_write = self.k.transpose(1, 2), self.v.transpose(1, 2)
        # One key head serves `group` query heads, whose rows stand together: [B * H_kv, G * n, d].
        q = self.turned.narrow(1, 0, s.heads).view(batch, n, s.kv_heads, group, s.head_dim).permute(0, 2, 3, 1, 4)
        self._from = q if rows > 1 else None
        self.q = (empty(*q.shape) if rows > 1 else q).flatten(0, 1)  # [B * H_kv, G, n, d]
        self.q_rows = self.q.flatten(1, 2)  # [B * H_kv, G * n, d]
        self.mixed = empty(rows, s.heads * s.head_dim)
        self._to = self.mixed.view(batch, n, s.kv_heads, group, s.head_dim).permute(0, 2, 3, 1, 4)
        self.out = self._to.flatten(0, 1).flatten(1, 2) if rows == 1 else None
        self.gate_up = empty(rows, 2 * s.intermediate)
        self.gate, self.up = self.gate_up.chunk(2, -1)
        self.activated = empty(rows, s.intermediate)

    def kept(self) -> Tensor:
        """The stream as it is now, `[B, n, D]`."""
        return self.stream.clone().view(self.batch, self.n, -1)

    def gather_q(self) -> None:
        """Bring `q` up to date with `turned`."""
        if self._from is not None:
            self.q.view(self._from.shape).copy_(self._from)

    def take(self, out: Tensor) -> None:
        """Bring `mixed` up to date with attention's output `[B * H_kv, G * n, d]` or `[B * H_kv, G, n, d]`."""
        self._to.copy_(out.reshape(self._to.shape))


class Scratches:
    """Kept scratches of narrow passes; wide ones are made anew."""

    KEPT_ROWS, KEPT = 64, 24

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._kept: dict[Any, Scratch] = {}

    def get(self, batch: int, n: int, device: torch.device) -> Scratch:
        """One for `[batch, n]` tokens; whatever it held is lost."""
        key = (batch, n, device)
        found = self._kept.get(key)
        if found is None:
            found = Scratch(self._sizes, batch, n, device)
            if batch * n <= self.KEPT_ROWS:
                if len(self._kept) >= self.KEPT:
                    self._kept.clear()
                self._kept[key] = found
        return found

    def moved(self, scratch: Scratch, device: torch.device) -> Scratch:
        """One on another device, with the stream of `scratch`."""
        there = self.get(scratch.batch, scratch.n, device)
        there.stream.copy_(scratch.stream)
        return there
