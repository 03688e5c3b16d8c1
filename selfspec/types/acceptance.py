"""The confidence of drafted tokens, and their acceptance rates by confidence: plain data, for profiles and controllers.

`selfspec.search` fits them to a trace. Does not import torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from selfspec.basics.checked_model import Data, NonNegative, Share
from selfspec.basics.errors import SelfspecError
from selfspec.types.costs import WIDER, CostModel
from selfspec.types.draft_path import DraftPath, SkipSet, as_path
from selfspec.types.draft_work import DRAFT_STEP, HEAD_STEP, LOOKUP_CALL, DraftCall, Work
from selfspec.types.methods import MOST_ROWS

MIN_GAP, MIN_PROBABILITY = 1e-6, 1e-9  # lower bounds of a gap, and of a probability's distance from 0 and 1
Weight = Annotated[float, Field(allow_inf_nan=False)]


class Confidence(Data):
    """The estimated chance that a drafted token is right, from the distribution that the drafter computed.

        1 / (1 + exp(-(bias + probability * log(p / (1 - p)) + gap * log(g))))

    p: the token's probability; g: the gap between the two best logits after processors and temperature (under rule
    `match`, between the two best sums of log p and noise). By default the confidence is p itself.

    A draft path that skips little is wrong only where the model itself hardly prefers one token to another. A small gap
    shows such positions; a low probability does not.
    """

    bias: Weight = 0.0
    probability: NonNegative = 1.0
    gap: NonNegative = 0.0

    @property
    def plain(self) -> bool:
        """Whether the confidence is the probability itself."""
        return self.bias == 0 and self.probability == 1 and self.gap == 0

    @property
    def inputs(self) -> str:
        """The inputs of the estimate: `probability`, `gap`, `both`, or `nothing` (equal for all tokens)."""
        if not self.probability:
            return "gap" if self.gap else "nothing"
        return "both" if self.gap else "probability"

    def estimate(self, probability: float, gap: float) -> float:
        """Return the confidence of a token with this probability and gap."""
        if self.plain:
            return probability
        x = self.bias
        if self.probability:
            p = min(max(probability, MIN_PROBABILITY), 1 - MIN_PROBABILITY)
            x += self.probability * math.log(p / (1 - p))
        if self.gap:
            x += self.gap * math.log(max(gap, MIN_GAP))
        return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


PROBABILITY = Confidence()


Chances = Annotated[list[Share], Field(min_length=2)]


class AcceptanceCurve(Data):
    """The acceptance rate of a drafted token by its confidence c, given that all tokens before it are accepted.

    Each list holds a value for each `confidence`, in rising order; the curve is linear in between.

    `accepted`: the chance that the token is accepted. `following`: the chance that the token drafted after it is
    accepted, if it is accepted itself. `candidates[0]`: the chance that the second candidate for its position is right
    instead, `candidates[1]` the third, and so on; the drafted token is the first candidate.
    """

    confidence: Chances = [0.0, 1.0]
    accepted: Chances = [0.0, 1.0]
    following: Chances = [0.5, 0.9]
    candidates: list[Chances] = [[0.3, 0.0], [0.1, 0.0]]

    @model_validator(mode="after")
    def _same_knots(self) -> Self:
        n = len(self.confidence)
        if any(a >= b for a, b in zip(self.confidence, self.confidence[1:], strict=False)):
            raise SelfspecError("acceptance.confidence: expected rising numbers from 0 to 1")
        candidates = ((f"candidates.{r}", values) for r, values in enumerate(self.candidates))
        for name, values in (("accepted", self.accepted), ("following", self.following), *candidates):
            if len(values) != n:
                raise SelfspecError(f"acceptance.{name}: {len(values)} chances for {n} confidences; expected as many")
        return self

    def place(self, confidence: float) -> tuple[int, float]:
        """Return the index of the knot below a confidence, and the fraction (0 to 1) of the way to the next knot."""
        knots = self.confidence
        i = min(max(bisect_right(knots, confidence) - 1, 0), len(knots) - 2)
        return i, min(max((confidence - knots[i]) / (knots[i + 1] - knots[i]), 0.0), 1.0)


def interpolate(values: Sequence[float], place: tuple[int, float]) -> float:
    """Interpolate linearly between a curve's `values` at its knots; `place`: as `AcceptanceCurve.place` returns it."""
    i, share = place
    return values[i] + share * (values[i + 1] - values[i])


class KeyCosts(NamedTuple):
    """The cost that each further key in the KV cache adds to a pass, in plain decode steps at the measured context.

    `plain`: added to a plain decode step. `row`: added to a verification pass for each row after the first. `draft`:
    added to a draft step.
    """

    plain: float = 0.0
    row: float = 0.0
    draft: float = 0.0


NO_KEY_COSTS = KeyCosts()
CONTEXT_STEP = 256  # keys; costs are computed for contexts that differ by multiples of it


@dataclass(frozen=True, slots=True)
class PayoffModel:
    """The costs and gains of drafting, for a rate-optimal controller; times are in plain decode steps.

    `draft`: the time of one drafted token. `rounds[w]`: the time of a round that verifies w rows, drafting excluded
    (`rounds[0]` is never read). `curve`: the acceptance rates. `wider`: the times of a draft step over 1, 2, .. tokens;
    empty if every draft step is over one token. `head`: the time of a step of a draft head below a draft path.

    All are times with `context` keys in the KV cache; `per_key` gives those with more, by `at`.
    """

    draft: float = 0.5
    rounds: tuple[float, ...] = tuple(1 + 0.05 * (rows - 1) for rows in range(MOST_ROWS + 1))
    curve: AcceptanceCurve = field(default_factory=AcceptanceCurve)
    wider: tuple[float, ...] = ()
    head: float = 0.0
    context: int = 0
    per_key: KeyCosts = NO_KEY_COSTS
    _longer: dict[int, PayoffModel] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def from_costs(
        cls,
        costs: CostModel,
        path: DraftPath | SkipSet,
        layers: int,
        curve: AcceptanceCurve,
        *,
        vocabulary: float = 1.0,
        spared: float = 0.0,
    ) -> PayoffModel:
        """Make the payoff model of drafting along a path from a cost model.

        `vocabulary`: the share of all tokens that may be drafted. `spared`: the share of a draft step saved for each
        drafted token by lookup tokens that the draft passes check.
        """
        costs = costs.along(path)
        rounds = ((costs.round + costs.verification(rows)) / costs.plain for rows in range(MOST_ROWS + 1))
        draft = costs.draft(path, layers, vocabulary=vocabulary) / costs.plain
        longer = costs.draft(path, layers, keys=costs.context + 1, vocabulary=vocabulary) / costs.plain
        per_layer = layers / costs.plain
        return cls(
            (1 - spared) * draft,
            tuple(rounds),
            curve,
            costs.passes(draft),
            context=costs.context,
            per_key=KeyCosts(
                per_layer * costs.attention_per_key, per_layer * costs.row_per_key, max(longer - draft, 0.0)
            ),
        )

    def at(self, keys: int) -> PayoffModel:
        """Return the payoff model with `keys` keys in the KV cache, in plain decode steps over as many.

        The costs are those at the nearest multiple of `CONTEXT_STEP` beyond `context`. Of fewer keys than `context`
        nothing is known: the model itself is returned, as it is if `per_key` is all 0.
        """
        further = CONTEXT_STEP * round((keys - self.context) / CONTEXT_STEP)
        if further <= 0 or not any(self.per_key):
            return self
        if further not in self._longer:
            self._longer[further] = self._with(further)
        return self._longer[further]

    def _with(self, further: int) -> PayoffModel:
        """Return the payoff model with `further` more keys in the KV cache."""
        plain = 1 + further * self.per_key.plain
        rounds = (
            (seconds + further * (self.per_key.plain + max(rows - 1, 0) * self.per_key.row)) / plain
            for rows, seconds in enumerate(self.rounds)
        )
        more = further * self.per_key.draft
        spared = self.draft / self.wider[0] if self.wider and self.wider[0] else 1.0
        return replace(
            self,
            draft=(self.draft + spared * more) / plain,
            rounds=tuple(rounds),
            wider=tuple((step + more) / plain for step in self.wider),
            head=self.head / plain,
            context=self.context + further,
            per_key=KeyCosts(self.per_key.plain / plain, self.per_key.row / plain, self.per_key.draft / plain),
        )

    def cost(self, work: Work) -> float:
        """Return the cost of draft work in plain decode steps; a call of unknown cost counts as one step."""
        return sum(calls * self._price(part) for part, calls in work)

    def _price(self, part: DraftCall) -> float:
        if part in (LOOKUP_CALL, HEAD_STEP):
            return self.head if part == HEAD_STEP else 0.0
        known = self.wider or (self.draft,)
        return known[part.rows - 1] if part.name == DRAFT_STEP.name and part.rows <= len(known) else 1.0


def estimate_payoff(path: DraftPath | SkipSet, layers: int, curve: AcceptanceCurve | None = None) -> PayoffModel:
    """Return a payoff model without measurements: the cost of a draft step is estimated from the path's modes."""
    shares = {"full": 1.0, "int8": 0.4, "int4": 0.3, "skip": 0.0}
    modes = as_path(path).modes(layers)
    draft = 0.1 + 0.9 * sum(shares[mode] for mode in modes) / len(modes)
    return PayoffModel(draft, curve=curve or AcceptanceCurve(), wider=(draft, *(draft * share for share in WIDER)))
