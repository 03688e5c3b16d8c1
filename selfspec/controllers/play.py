"""One draft as a controller plays it: the same for drafting and for replay. Knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Controller


class Play:
    """One draft, token by token: a function of the confidences alone.

    `depth`: the most tokens of the chain. `wants`: whether another token is to be drafted.
    """

    __slots__ = ("_controller", "_depth", "confidences", "wants")

    def __init__(self, controller: Controller, *, depth: int) -> None:
        self._controller, self._depth = controller, depth
        self.confidences: list[float] = []
        self.wants = depth > 0

    def see(self, confidence: float, *, last: bool = False) -> bool:
        """A token was drafted, the last one that can be; whether another is wanted."""
        self.confidences.append(confidence)
        self.wants = not last and len(self.confidences) < self._depth and self._controller.go_on(self.confidences)
        return self.wants

    def candidates(self, most: int, *, nodes: int) -> Sequence[int]:
        """How many candidates each place has, the drafted token counted; in all at most `nodes`."""
        counts = [1] * len(self.confidences)
        if most > 1 and counts:
            counts = [1 + n for n in self._controller.beside(self.confidences, most - 1)]
            surplus = sum(counts) - nodes
            for i in range(len(counts) - 1, -1, -1):
                if surplus <= 0:
                    break
                dropped = min(counts[i] - 1, surplus)
                counts[i] -= dropped
                surplus -= dropped
        return counts
