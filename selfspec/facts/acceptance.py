"""How often drafted tokens are right, by their confidence: plain data, for profiles and controllers.

`selfspec.search` fits it to a trace. Knows nothing of torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Self

from pydantic import Field, model_validator

from selfspec.basics.errors import SelfspecError
from selfspec.basics.schema import Data
from selfspec.facts.costs import CostModel
from selfspec.facts.limits import MOST_ROWS
from selfspec.facts.skip import SkipSet
from selfspec.facts.work import DRAFT_STEP, Work

Chance = Annotated[float, Field(ge=0, le=1)]
Chances = Annotated[list[Chance], Field(min_length=2)]


class AcceptanceCurve(Data):
    """Chances at rising confidences c of a drafted token, all before it in its draft accepted; in between, linear.

    `accepted`: that it is accepted (a). `following`: that the token drafted after it is, should it be itself (the
    mean a of what comes next). `beside[r]`: that the r-th further candidate at its place is the right one in its
    stead (r from 0).
    """

    confidence: Chances = [0.0, 1.0]
    accepted: Chances = [0.0, 1.0]
    following: Chances = [0.5, 0.9]
    beside: list[Chances] = [[0.3, 0.0], [0.1, 0.0]]

    @model_validator(mode="after")
    def _same_knots(self) -> Self:
        n = len(self.confidence)
        if any(a >= b for a, b in zip(self.confidence, self.confidence[1:], strict=False)):
            raise SelfspecError("acceptance.confidence: want rising numbers from 0 to 1")
        candidates = ((f"beside.{r}", values) for r, values in enumerate(self.beside))
        for name, values in (("accepted", self.accepted), ("following", self.following), *candidates):
            if len(values) != n:
                raise SelfspecError(f"acceptance.{name}: {len(values)} chances for {n} confidences; want as many")
        return self

    def place(self, confidence: float) -> tuple[int, float]:
        """The last knot at or below a confidence (but one, at most), and how far it lies towards the next, 0 to 1."""
        knots = self.confidence
        i = min(max(bisect_right(knots, confidence) - 1, 0), len(knots) - 2)
        return i, min(max((confidence - knots[i]) / (knots[i + 1] - knots[i]), 0.0), 1.0)


def between(values: Sequence[float], place: tuple[int, float]) -> float:
    """The value at a `place`, by a line between two knots."""
    i, share = place
    return values[i] + share * (values[i + 1] - values[i])


@dataclass(frozen=True, slots=True)
class Outlook:
    """What drafting under one skip set costs and brings, as a rate-optimal controller is to know it.

    `draft`: a draft step; `rounds[w]`: a round whose verification has w rows, beside its draft steps; both in plain
    decoding steps. `rounds[0]` is never read.
    """

    draft: float = 0.5
    rounds: tuple[float, ...] = tuple(1 + 0.05 * (rows - 1) for rows in range(MOST_ROWS + 1))
    curve: AcceptanceCurve = field(default_factory=AcceptanceCurve)

    @classmethod
    def of(
        cls, costs: CostModel, skip: SkipSet, layers: int, curve: AcceptanceCurve, *, vocabulary: float = 1.0
    ) -> Outlook:
        """By a cost model; `vocabulary` is the share of it that drafts are from."""
        rounds = ((costs.round + costs.verification(rows)) / costs.plain for rows in range(MOST_ROWS + 1))
        return cls(costs.draft(skip, layers, vocabulary=vocabulary) / costs.plain, tuple(rounds), curve)

    def price(self, work: Work) -> float:
        """Plain decoding steps that this work takes; a part that nobody has priced counts as one for each call."""
        return sum(calls * (self.draft if part == DRAFT_STEP else 1.0) for part, calls in work)


def guess(skipped: float, curve: AcceptanceCurve | None = None) -> Outlook:
    """An outlook where nothing was measured: `skipped` is the share of sub-layers that drafting bypasses."""
    return Outlook(draft=1 - 0.9 * skipped, curve=curve or AcceptanceCurve())
