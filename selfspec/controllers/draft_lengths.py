"""The choice of a draft's length before it begins, as a captured round needs it. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.types.controller import StoppingRule

FIRST = 4.0  # tokens of a draft assumed before the first one
MEMORY = 0.5  # weight that earlier drafts keep with each further one


class DraftLengths:
    """The choice of the number of tokens to draft: as many as the controller let recent drafts of a sequence have.

    Drafting more costs draft steps for tokens that the controller masks; drafting less loses tokens.
    """

    def __init__(self) -> None:
        self._mean = FIRST

    def observe(self, drafted: int, computed: int) -> None:
        """Learn from a draft of `drafted` tokens of `computed` ones; one that was not ended early wanted more."""
        if not drafted:
            return
        wanted = 2 * computed if drafted == computed else drafted
        self._mean = MEMORY * self._mean + (1 - MEMORY) * wanted

    def choose(self, rule: StoppingRule, lengths: Sequence[int], most: int) -> int:
        """Return the least of the rising `lengths` that is enough; 0 if all are above `most`, which none may exceed."""
        allowed = [length for length in lengths if length <= most]
        enough = min(max(self._mean, rule.certain), rule.most)
        return next((length for length in allowed if length >= enough), allowed[-1] if allowed else 0)
