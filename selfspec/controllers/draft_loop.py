"""One draft as a controller plays it: the same rules for real drafting and for the search's replay.

Pure Python: knows nothing of models and tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Controller


class DraftLoop:
    """A draft under way, token by token; what it decides follows from the confidences and the controller alone.

    Whoever drafts does so while it `wants` another token, shows each one's confidence to `see`, and asks at the end
    for the `candidates`. `depth`: the most tokens that may be drafted one after the other. `together`: it wants another
    wherever the controller ever might, as what several sequences draft is decided together (`BatchDraftScheduler`).
    """

    __slots__ = ("_controller", "_depth", "_together", "confidences", "wants")

    confidences: list[float]
    wants: bool

    def __init__(self, controller: Controller, *, depth: int, together: bool = False) -> None:
        self._controller, self._depth, self._together = controller, depth, together
        self.confidences = []
        self.wants = depth > 0

    def see(self, confidence: float, *, last: bool = False) -> bool:
        """A token was drafted; whether another is wanted. `last`: nothing can follow it (end of sequence)."""
        self.confidences.append(confidence)
        self.wants = not last and len(self.confidences) < self._depth and self._goes_on(confidence)
        return self.wants

    def _goes_on(self, confidence: float) -> bool:
        if self._together:
            return confidence >= self._controller.lowest(len(self.confidences))
        return self._controller.go_on(self.confidences)

    def hope(self, first: float) -> tuple[float, float]:
        """The chances that the next token would be accepted, and one after that; `first`: of a draft's first token."""
        return self._controller.hope(self.confidences, first)

    def candidates(self, most: int, *, nodes: int) -> Sequence[int]:
        """How many candidates the place of each drafted token has, the drafted one counted: 1 to `most` each.

        Together they are at most `nodes`, or the drafted tokens alone where those are more: the last places give up
        theirs first.
        """
        drafted = len(self.confidences)
        if most <= 1 or not drafted:
            return [1] * drafted
        wanted = self._controller.candidates(self.confidences, most)
        if sum(wanted) <= nodes:
            return wanted
        counts, spare = [], max(nodes - drafted, 0)
        for count in wanted:
            counts.append(1 + min(count - 1, spare))
            spare -= counts[-1] - 1
        return counts
