"""Bookkeeping of cache rows: committed lengths and tokens, independent of the memory layout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class CacheRows:
    """The rows of a KV cache, one for each sequence, each of at most `slots` slots.

    `length[row]` is the number of committed slots of a row, whose keys and values the full target model computed.
    `tokens[row]` are the row's tokens if the caller has set them, else empty. Tokens from index `length[row]` on have
    no keys and values yet.
    """

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

    def rewind(self, row: int, length: int) -> None:
        """Set a row's length to `length`, which discards the slots from `length` on."""
        self.length[row] = length
