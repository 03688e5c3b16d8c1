"""The rate-optimal controller: it drafts more tokens and candidates while the expected tokens per second rise.

Does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Self

from selfspec.basics.errors import SelfspecError
from selfspec.types.acceptance import PayoffModel, interpolate
from selfspec.types.controller import ChanceCurve, StoppingRule
from selfspec.types.methods import MOST_ROWS

from .base import Controller

STEPS_KNOWN = 200.0  # prior weight of the initial `rate`, in plain decode steps


class _LearnedCurve:
    """The chances at an acceptance curve's knots, corrected by verification results.

    An observation between two knots counts at both, weighted by nearness. The uncorrected value `base` counts for
    `strength` observations. An observation's weight decays by the factor `memory` with each later one at its knots.
    """

    def __init__(self, base: Sequence[float], strength: float, memory: float) -> None:
        self._base, self._strength, self._memory = base, strength, memory
        self.values = list(base)
        self._counts = [0.0] * len(base)
        self._hits = [0.0] * len(base)

    def record(self, place: tuple[int, float], hit: bool) -> None:
        """Count a hit or a miss at a place of the curve, as `AcceptanceCurve.place` returns it."""
        for i, weight in ((place[0], 1 - place[1]), (place[0] + 1, place[1])):
            if weight:
                decay = self._memory**weight
                self._counts[i] = decay * self._counts[i] + weight
                self._hits[i] = decay * self._hits[i] + weight * hit
                known = self._strength + self._counts[i]
                self.values[i] = (self._strength * self._base[i] + self._hits[i]) / known


@dataclass
class RateOptimal(Controller):
    """The controller that maximises tokens per second: it drafts more if the expected tokens are worth their time.

    Dinkelbach's method (1967): work that takes the time of t plain decode steps is worth it if its expected tokens
    exceed `rate` * t, where `rate` is the tokens that decoding emits in the time of a plain step.

    Another token: P, the chance that all tokens drafted so far are accepted, is the product of the payoff model's curve
    `accepted` at their confidences. The curve's following(c) is the chance that a token is accepted, given that the
    token drafted before it, with confidence c, is accepted. So the next token is accepted with chance P * following(c),
    c the confidence in the last drafted token. Each later token is accepted with chance l if the token before it is, l
    the mean of `following`. So j more tokens bring P * following(c) * (1 + l + ... + l^(j-1)) expected tokens, and take
    j draft steps and j more rows to verify. All j are considered, as the cost of a verification pass rises in steps:
    cheap rows may follow an expensive row.

    Candidates: candidates[0](c) is the chance that a position's second candidate is right instead of its drafted token,
    of confidence c; candidates[1](c) is that of the third, and so on. If all tokens before the position are accepted
    with chance P, its second candidate brings P * candidates[0](c) tokens, the third P * candidates[1](c), .. The
    likeliest candidates of all positions are taken, as many as maximise the gain after subtracting `rate` times the
    time of their rows.

    Lookup tokens cost nothing to draft. If each is right with chance p_1, p_2, .. when all before it are, n of them
    bring 1 + p_1 + p_1 p_2 + .. tokens, and take the time of a round of n + 1 rows. If the best n brings more tokens
    than `rate` times that time, n lookup tokens are verified and nothing is drafted.

    `rate`: at the start, the expected tokens in the time of a plain step; then updated by the tokens and the expected
    time of each round that drafted, and never below 1. Drafting stops after a token of confidence below `floor`, and
    after `k_max` tokens. The verification of a drafted token is an observation, which corrects the payoff model's
    curve. `strength`: the weight that the initial curve keeps, in observations. `memory`: the factor by which the
    weight of an observation or a round decays with each later one.
    """

    name: ClassVar[str] = "rate"
    asks_payoff: ClassVar[bool] = True
    rate: float = 1.0
    k_max: int = 12
    floor: float = 0.05
    strength: float = 16.0
    memory: float = 0.99
    payoff: PayoffModel = field(default_factory=PayoffModel, metadata={"option": False})

    def __post_init__(self) -> None:
        self.check_count("k_max")
        self.check_shares("floor", "memory")
        if not 1 <= self.rate < math.inf:
            raise SelfspecError(f"controller 'rate': rate {self.rate}: expected 1 (as fast as plain decoding) or more")
        if not 0 <= self.strength < math.inf:
            raise SelfspecError(f"controller 'rate': strength {self.strength}: expected 0 or more rounds, and finite")
        self._first_rate, self._curve = self.rate, self.payoff.curve
        self._accepted = _LearnedCurve(self._curve.accepted, self.strength, self.memory)
        self._following = _LearnedCurve(self._curve.following, self.strength, self.memory)
        self._time, self._tokens = STEPS_KNOWN, STEPS_KNOWN * self.rate
        self._local = _LocalCosts(self.payoff, _prices(self.payoff, self.k_max), 1.0)
        self._locals = {self.payoff.context: self._local}

    def set_context(self, keys: int) -> None:
        """Use the payoff model's costs at a context length of `keys` tokens."""
        payoff = self.payoff.at(keys)
        if payoff.context not in self._locals:
            pace = best_rate(payoff, self.k_max) / best_rate(self.payoff, self.k_max)
            self._locals[payoff.context] = _LocalCosts(payoff, _prices(payoff, self.k_max), pace)
        self._local = self._locals[payoff.context]

    @property
    def _local_rate(self) -> float:
        """The tokens in the time of a plain step at the context length; `rate` is at the payoff model's own."""
        return max(1.0, self.rate * self._local.pace)

    def go_on(self, confidences: Sequence[float]) -> bool:
        """Return whether some number of further tokens is expected to be worth its time."""
        n, last = len(confidences), confidences[-1]
        if n >= self.k_max or last < self.floor:
            return False
        return self._next_accepted(confidences) > self._local_rate * self._local.prices[n]

    def _next_accepted(self, confidences: Sequence[float]) -> float:
        """Return the chance that all drafted tokens, which have these confidences, and the next token are accepted."""
        chance = 1.0
        for confidence in confidences:
            chance *= interpolate(self._accepted.values, self._curve.place(confidence))
        return chance * interpolate(self._following.values, self._curve.place(confidences[-1]))

    def stopping(self, most: int) -> StoppingRule:
        """Return the rule: the confidence floor, the prices at the current rate, the corrected acceptance curve."""
        prices = [self._local_rate * price for price in self._local.prices[1 : most + 1]]
        curve = ChanceCurve(tuple(self._curve.confidence), tuple(self._accepted.values), tuple(self._following.values))
        padded = (*prices, *[math.inf] * (most - len(prices)))
        return StoppingRule(self._least(most), padded, curve)

    def acceptance_chances(self, confidences: Sequence[float], first: float) -> tuple[float, float]:
        """Return the two probabilities by the corrected acceptance curve; the first token of a draft has `first`."""
        later = _mean_following(self._following.values)
        return self._next_accepted(confidences) if confidences else first, later

    def candidates(self, confidences: Sequence[float], most: int) -> Sequence[int]:
        """Return the numbers of candidates, 1 to `most` each, that together gain most for their time."""
        counts = [1] * len(confidences)
        further: list[tuple[float, int]] = []  # further candidates: chance of acceptance, and index of the position
        before = 1.0
        for i, confidence in enumerate(confidences):
            place, chance = self._curve.place(confidence), 1.0
            for chances in self._curve.candidates[: most - 1]:
                chance = min(chance, interpolate(chances, place))
                further.append((before * chance, i))
            before *= interpolate(self._accepted.values, place)
        further.sort(key=lambda candidate: -candidate[0])
        rows, rounds = 1 + len(confidences), self._local.payoff.rounds
        best, taken, value = 0.0, 0, 0.0
        for number, (chance, _) in enumerate(further[: max(MOST_ROWS - rows, 0)], start=1):
            value += chance
            worth = value - self._local_rate * (rounds[rows + number] - rounds[rows])
            if worth > best:
                best, taken = worth, number
        for _, i in further[:taken]:
            counts[i] += 1
        return counts

    def lookup_length(self, chances: Sequence[float], *, only: bool = False) -> int:
        """Return the number of lookup tokens that gains most over decoding at `rate`; 0 if no number gains.

        `only`: compare with plain decoding instead.
        """
        best, taken, rate = 0.0, 0, 1.0 if only else self._local_rate
        tokens = reach = 1.0
        for n, chance in enumerate(chances, start=1):
            reach *= chance
            tokens += reach
            worth = tokens - rate * self._local.payoff.rounds[1 + n]
            if worth > best:
                best, taken = worth, n
        return taken

    def min_confidence(self, drafted: int) -> float:
        """Return the floor, or infinity once `k_max` tokens are drafted."""
        return self.floor if drafted < self.k_max else math.inf

    def observe(
        self, confidences: Sequence[float], accepted: int, *, candidates: int | None = None, other: int = 0
    ) -> None:
        """Update the curve at the verified confidences, and the rate by the round's tokens and expected time.

        A round without drafted tokens changes nothing.
        """
        drafted = len(confidences)
        if not drafted:
            return
        before = None
        for i in range(min(accepted + 1, drafted)):
            place = self._curve.place(confidences[i])
            self._accepted.record(place, i < accepted)
            if before is not None:
                self._following.record(before, i < accepted)
            before = place
        rows = 1 + (drafted if candidates is None else candidates)
        took = drafted * self._local.payoff.draft + self._local.payoff.rounds[rows]
        self._time = self.memory * self._time + took * self._local.pace
        self._tokens = self.memory * self._tokens + accepted + other + 1
        self.rate = max(1.0, self._tokens / self._time)

    def with_payoff(self, payoff: PayoffModel, *, rate: float | None = None) -> Self:
        """Return a controller with this controller's options and `payoff`; `rate`: initial rate, None: unchanged."""
        return dataclasses.replace(self, payoff=payoff, rate=self.rate if rate is None else rate)

    def learnt(self) -> PayoffModel:
        """Return the payoff model with its curve corrected by observations."""
        corrected = {"accepted": list(self._accepted.values), "following": list(self._following.values)}
        return dataclasses.replace(self.payoff, curve=self._curve.model_copy(update=corrected))

    def start(self) -> Self:
        """Return a copy without observations."""
        return dataclasses.replace(self, rate=self._first_rate)


class _LocalCosts(NamedTuple):
    """A payoff model at a context length, and what follows from it.

    `prices`: as `_prices` returns them. `pace`: the rate that drafting is expected to reach there, divided by the rate
    at the context length that the payoff model was measured at.
    """

    payoff: PayoffModel
    prices: list[float]
    pace: float


def _mean_following(following: Sequence[float]) -> float:
    """Return the mean chance that a token is right if the token before it is."""
    return min(sum(following) / len(following), 1.0)


def best_rate(payoff: PayoffModel, k_max: int) -> float:
    """Return the expected tokens in the time of a plain step of the best draft length, all tokens being alike."""
    later, tokens, best = _mean_following(payoff.curve.following), 1.0, 1.0
    for n in range(1, min(k_max, len(payoff.rounds) - 2) + 1):
        tokens += later**n
        best = max(best, tokens / (n * payoff.draft + payoff.rounds[n + 1]))
    return best


def _prices(payoff: PayoffModel, k_max: int) -> list[float]:
    """Return, for n = 0, 1, .. drafted tokens, the cost per token of drafting on if the next token is surely right.

    The cost is in plain decode steps. Drafting j more tokens takes j draft steps and a verification of j more rows. If
    the first of these j tokens is right, they bring 1 + l + ... + l^(j-1) expected tokens, l the mean chance that a
    token is right if the token before it is. The returned cost is that of the cheapest j.
    """
    later = _mean_following(payoff.curve.following)
    prices = []
    for n in range(k_max):
        ways, tokens = [], 0.0
        for j in range(1, k_max - n + 1):
            tokens += later ** (j - 1)
            time = j * payoff.draft + payoff.rounds[1 + n + j] - payoff.rounds[1 + n]
            ways.append(time / tokens)
        prices.append(max(min(ways), 0.0))
    return prices
