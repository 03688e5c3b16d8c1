"""What the rows of a cache hold, however it lies in memory. Knows nothing of keys and values."""

from __future__ import annotations

from collections.abc import Sequence


class CacheRows:
    """The rows of a cache, each of at most `slots` slots.

    `length[row]` is the number of committed slots of a row: its keys below that are the whole model's own.
    `tokens[row]`: what they are the keys of, where somebody has said so; tokens beyond `length` have no keys yet.
    """

    def __init__(self, rows: int, slots: int) -> None:
        self.rows = rows
        self.slots = slots
        self.length = [0] * rows
        self.tokens: list[Sequence[int]] = [()] * rows

    def clear(self, row: int) -> None:
        """Forget a row."""
        self.length[row], self.tokens[row] = 0, ()

    def known(self, row: int) -> Sequence[int]:
        """The tokens that a row holds the keys of, as far as they are known."""
        return self.tokens[row][: self.length[row]]

    def shared(self, row: int, tokens: Sequence[int]) -> int:
        """How many committed slots of a row, from the first on, hold the keys of what `tokens` begin with."""
        known = self.known(row)
        pairs = enumerate(zip(known, tokens, strict=False))
        return next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(known), len(tokens)))

    def rewind(self, row: int, length: int) -> None:
        """Forget a row's slots from `length` on."""
        self.length[row] = length
