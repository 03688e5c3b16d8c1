"""The rate-optimal controller: drafts on, and adds candidates, while that is to raise the tokens per second."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from selfspec.basics.errors import SelfspecError
from selfspec.facts.acceptance import Outlook, between
from selfspec.facts.limits import MOST_ROWS

from .base import Options

ROUNDS_KEPT = 200.0  # plain steps' time of what `rate` is taken to rest on when it starts


class _Learnt:
    """Chances at a curve's knots, mended by what is seen: it counts at the two knots around it, the older the less."""

    def __init__(self, base: Sequence[float], strength: float, memory: float) -> None:
        self._base, self._strength, self._memory = base, strength, memory
        self.values = list(base)
        self._seen = [0.0] * len(base)
        self._hits = [0.0] * len(base)

    def see(self, place: tuple[int, float], hit: bool) -> None:
        """Count a hit or a miss."""
        for i, weight in ((place[0], 1 - place[1]), (place[0] + 1, place[1])):
            if weight:
                kept = self._memory**weight
                self._seen[i] = kept * self._seen[i] + weight
                self._hits[i] = kept * self._hits[i] + weight * hit
                known = self._strength + self._seen[i]
                self.values[i] = (self._strength * self._base[i] + self._hits[i]) / known


@dataclass
class RateOptimal(Options):
    """Maximises the tokens per second, Dinkelbach's way: goes on while what that brings is worth its time at the rate.

    P, the chance that all drafted so far is accepted, is the product of a(c) over their confidences c. With n tokens
    drafted, the next j are expected to bring P * following(c_n) * (1 + l + .. + l^(j-1)) tokens, l the mean chance
    that a draft goes on as it should, and take j draft steps and a verification of j more rows. It goes on where some
    j brings more than `rate` times what it takes; more than the next token counts because a verification's time has
    steps. The further candidates of a place whose tokens before are accepted with chance P bring P * beside_r(c) each:
    the likeliest are added, as many as bring most beyond `rate` times the rows they add.

    `rate`: tokens in the time of a plain decoding step, 1 at least. It never goes on below `floor`, nor beyond `k_max`
    tokens. `strength`: rounds that the `outlook`'s curve counts for beside what is seen; `memory`: what a round
    counts for when the next is seen.
    """

    name: ClassVar[str] = "rate"
    rate: float = 1.0
    k_max: int = 12
    floor: float = 0.05
    strength: float = 16.0
    memory: float = 0.99
    outlook: Outlook = field(default_factory=Outlook, metadata={"option": False})

    def __post_init__(self) -> None:
        self._count("k_max")
        self._shares("floor", "memory")
        if not 1 <= self.rate < math.inf:
            raise SelfspecError(f"controller 'rate': rate {self.rate}: want 1 (as fast as plain decoding) or more")
        if not 0 <= self.strength < math.inf:
            raise SelfspecError(f"controller 'rate': strength {self.strength}: want 0 or more rounds, and finite")
        self._start, self._curve = (self.rate, self.outlook), self.outlook.curve
        self._accepted = _Learnt(self._curve.accepted, self.strength, self.memory)
        self._following = _Learnt(self._curve.following, self.strength, self.memory)
        self._time, self._tokens = ROUNDS_KEPT, ROUNDS_KEPT * self.rate
        self._prices = _prices(self.outlook, self.k_max)

    def go_on(self, confidences: Sequence[float]) -> bool:
        """Whether some further tokens are expected to be worth their time."""
        n, last = len(confidences), confidences[-1]
        if n >= self.k_max or last < self.floor:
            return False
        gain = between(self._following.values, self._curve.place(last))
        for confidence in confidences:
            gain *= between(self._accepted.values, self._curve.place(confidence))
        return gain > self.rate * self._prices[n]

    def beside(self, confidences: Sequence[float], most: int) -> Sequence[int]:
        """The number for each that together are expected to bring most for their time."""
        counts = [0] * len(confidences)
        candidates: list[tuple[float, int]] = []
        before = 1.0
        for i, confidence in enumerate(confidences):
            place, chance = self._curve.place(confidence), 1.0
            for r in range(min(most, len(self._curve.beside))):
                chance = min(chance, between(self._curve.beside[r], place))
                candidates.append((before * chance, i))
            before *= between(self._accepted.values, place)
        candidates.sort(key=lambda candidate: -candidate[0])
        rows, rounds = 1 + len(confidences), self.outlook.rounds
        best, taken, value = 0.0, 0, 0.0
        for number, (chance, _) in enumerate(candidates[: max(MOST_ROWS - rows, 0)], start=1):
            value += chance
            worth = value - self.rate * (rounds[rows + number] - rounds[rows])
            if worth > best:
                best, taken = worth, number
        for _, i in candidates[:taken]:
            counts[i] += 1
        return counts

    def lowest(self, drafted: int) -> float:
        """The floor."""
        return self.floor if drafted < self.k_max else math.inf

    def observe(self, confidences: Sequence[float], accepted: int, *, candidates: int = 0, leaf: bool = False) -> None:
        """Mend the curve where it was tried, and the rate by what the round brought and is known to take."""
        drafted = len(confidences)
        if not drafted:
            return
        before = None
        for i in range(min(accepted + 1, drafted)):
            place = self._curve.place(confidences[i])
            self._accepted.see(place, i < accepted)
            if before is not None:
                self._following.see(before, i < accepted)
            before = place
        took = drafted * self.outlook.draft + self.outlook.rounds[1 + drafted + candidates]
        self._time = self.memory * self._time + took
        self._tokens = self.memory * self._tokens + accepted + leaf + 1
        self.rate = max(1.0, self._tokens / self._time)

    def learnt(self) -> Outlook:
        """The outlook as it now stands."""
        seen = {"accepted": list(self._accepted.values), "following": list(self._following.values)}
        return dataclasses.replace(self.outlook, curve=self._curve.model_copy(update=seen))

    def fresh(self) -> Self:
        """A copy that has learnt nothing."""
        rate, outlook = self._start
        return dataclasses.replace(self, rate=rate, outlook=outlook)


def _prices(outlook: Outlook, k_max: int) -> list[float]:
    """For n drafted tokens, the least time, in plain steps, of the next j for each that is as likely as the next."""
    following = outlook.curve.following
    later = min(sum(following) / len(following), 1.0)
    prices = []
    for n in range(k_max):
        ways, reach = [], 0.0
        for j in range(1, k_max - n + 1):
            reach += later ** (j - 1)
            time = j * outlook.draft + outlook.rounds[1 + n + j] - outlook.rounds[1 + n]
            ways.append(time / reach)
        prices.append(max(min(ways), 0.0))
    return prices
