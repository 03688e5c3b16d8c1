"""Bookkeeping of cache rows: committed lengths and tokens, whatever the memory layout."""

from __future__ import annotations

from collections.abc import Sequence


class CacheRows:
    """The rows of a cache, each of at most `slots` slots.

    `length[row]` is the number of committed slots of a row; the full target computed their keys and values.
    `tokens[row]` are the tokens of these slots, where a caller has set them; tokens beyond `length` have no keys yet.
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
        """Return the known tokens of a row's committed slots."""
        return self.tokens[row][: self.length[row]]

    def shared(self, row: int, tokens: Sequence[int]) -> int:
        """Return the length of the longest common prefix of `tokens` and the row's known committed tokens."""
        known = self.known(row)
        pairs = enumerate(zip(known, tokens, strict=False))
        return next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(known), len(tokens)))

    def rewind(self, row: int, length: int) -> None:
        """Set a row's length to `length`, which discards the slots from there on."""
        self.length[row] = length
