"""The state of a grammar after a text's new tokens, for prefixes that come in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class GrammarState:
    """An `llguidance` matcher that consumes tokens, and rolls back to the common prefix for another prefix."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self._path: list[int] = []  # tokens that the matcher has consumed

    def follow(self, new: Sequence[int]) -> bool:
        """Move the matcher to the state after the tokens `new`; return False if the grammar rejects them."""
        new = list(new)
        same = min(len(new), len(self._path))
        while new[:same] != self._path[:same]:
            same -= 1
        if same < len(self._path):
            self.matcher.rollback(len(self._path) - same)
        taken = self.matcher.try_consume_tokens(new[same:])
        self._path = new[: same + taken]
        return len(self._path) == len(new)
