"""Bookkeeping of cache rows: committed lengths and tokens, independent of the memory layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class CacheRows:
    """The rows of a KV cache, one for each sequence, each of at most `slots` slots.

    `length[row]` is the number of committed slots of a row, whose keys and values the full target model computed.
    `tokens[row]` are the row's tokens if the caller has set them, else empty. Tokens from index `length[row]` on have
    no keys and values yet. `positions` `[rows, slots]`, unless None, holds the sequence position of the token in each
    slot, for sliding windows. The position of a committed slot equals its slot number.
    """

    positions: Tensor | None = None

    def __init__(self, rows: int, slots: int) -> None:
        self.rows = rows
        self.slots = slots
        self.length = [0] * rows
        self.tokens: list[Sequence[int]] = [()] * rows

    def clear(self, row: int) -> None:
        """Set a row's length to zero and drop its tokens."""
        self.length[row], self.tokens[row] = 0, ()

    def known(self, row: int) -> Sequence[int]:
        """Return the tokens of a row's committed slots, as far as the caller has set them in `tokens`."""
        return self.tokens[row][: self.length[row]]

    def shared(self, row: int, tokens: Sequence[int]) -> int:
        """Return the length of the longest common prefix of `tokens` and the row's known committed tokens."""
        known = self.known(row)
        pairs = enumerate(zip(known, tokens, strict=False))
        return next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(known), len(tokens)))

    def written(self, rows: slice, slots: int | Tensor) -> None:
        """Note that keys and values of these rows are about to be written, from the first of `slots` on."""

    def set_positions(self, positions: int | Tensor, slots: int | Tensor, n: int, rows: slice) -> None:
        """Record the sequence positions of the tokens in n slots; the arguments are those of `Runtime.forward`."""
        assert self.positions is not None
        if isinstance(positions, int):
            positions = torch.arange(positions, positions + n, device=self.positions.device)[None]
        row_positions = self.positions[rows]
        if isinstance(slots, int):
            row_positions[:, slots : slots + n] = positions
        else:
            row_positions.scatter_(1, slots, positions.expand_as(slots))

    def window_mask(self, window: int, positions: int | Tensor, n: int, kv_len: int, rows: slice) -> Tensor:
        """Return the sliding-window mask `[B, n, kv_len]` of n tokens at `positions` over the first `kv_len` slots.

        It is true where the position of a slot is greater than the position of the token minus `window`.
        """
        assert self.positions is not None
        if isinstance(positions, int):
            positions = torch.arange(positions, positions + n, device=self.positions.device)[None]
        return self.positions[rows, None, :kv_len] > positions.unsqueeze(-1) - window

    def _settle_positions(self, row: int, start: int, end: int) -> None:
        """Set the positions of committed slots, from `start` up to, not including, `end`."""
        if self.positions is not None:
            self.positions[row, start:end] = torch.arange(start, end, device=self.positions.device)

    def rewind(self, row: int, length: int) -> None:
        """Set a row's length to `length`, which discards the slots from `length` on."""
        self.length[row] = length
