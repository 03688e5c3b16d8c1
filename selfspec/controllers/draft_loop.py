"""The loop that applies a controller to one draft: the same rules for real drafting and for the search's replay.

Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, islice, takewhile
from operator import mul

from selfspec.types.controller import StoppingRule

from .base import Controller


class DraftLoop:
    """A draft in progress, token by token; its decisions depend on the drafted tokens and the controller alone.

    The drafter drafts while the loop `wants` another token, passes each token's confidence and id to `record`, and asks
    for the `candidates` at the end. `depth`: the longest draft length. `together`: a `BatchDraftScheduler` decides for
    the whole batch when drafting stops; the loop alone then stops only where the last confidence is below the
    controller's `min_confidence`.
    """

    __slots__ = ("_controller", "_depth", "_together", "confidences", "wants")

    confidences: list[float]
    wants: bool

    def __init__(self, controller: Controller, *, depth: int, together: bool = False) -> None:
        self._controller, self._depth, self._together = controller, depth, together
        self.confidences = []
        self.wants = depth > 0

    def record(self, confidence: float, token: int | None = None, *, last: bool = False) -> bool:
        """Record a drafted token; return whether to draft another.

        `token`: its id; None in the search's replay, which knows confidences only. `last`: whether the token ends the
        sequence.
        """
        self.confidences.append(confidence)
        self.wants = not last and len(self.confidences) < self._depth and self._goes_on(confidence, token)
        return self.wants

    def _goes_on(self, confidence: float, token: int | None) -> bool:
        if token is not None and self._controller.ends_draft(token):
            return False
        if self._together:
            return confidence >= self._controller.min_confidence(len(self.confidences))
        return self._controller.go_on(self.confidences)

    def survival_chances(self, first: float, most: int) -> list[float]:
        """Return the chances that the 1st, 2nd, .. further token is accepted, all tokens before it included.

        At most `most` chances, and only of tokens that the draft may still have. `first`: the recent acceptance rate of
        drafts' first tokens.
        """
        drafted, controller = len(self.confidences), self._controller
        may = takewhile(lambda n: not n or controller.min_confidence(n) < math.inf, range(drafted, self._depth))
        further = sum(1 for _ in islice(may, most))
        upcoming, later = controller.acceptance_chances(self.confidences, first)
        return list(accumulate([upcoming, *[later] * (further - 1)], mul)) if further else []

    def candidates(self, most: int, *, nodes: int) -> Sequence[int]:
        """Return the number of candidates of each drafted position, drafted token included: 1 to `most`.

        Their sum is at most `nodes`, or the number of drafted tokens if that is more. The last positions lose
        candidates first.
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


FIRST = 4.0  # tokens of a draft assumed before the first one
MEMORY = 0.5  # weight that earlier drafts keep with each further one


class DraftLengths:
    """The choice of the number of tokens to draft: about as many as the controller let recent drafts have.

    Drafting more costs draft steps for tokens that the controller masks; drafting less loses tokens. For draft steps of
    a third to a half of a verification, the nearest length brings the most tokens a second.
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
        """Return the one of the rising `lengths` that is nearest; 0 if all are above `most`, which none may exceed.

        Tokens that `rule` drafts whatever their confidences are fit in it, if they do in any.
        """
        allowed = [length for length in lengths if length <= most]
        enough = [length for length in allowed if length >= min(rule.certain, rule.most)] or allowed[-1:]
        wanted = min(self._mean, rule.most)
        return min(enough, key=lambda length: abs(length - wanted), default=0)
