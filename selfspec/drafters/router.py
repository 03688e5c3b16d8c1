"""Several ways to draft for one model: each sequence takes the one that brings most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from selfspec.drafters.guard import Guard
from selfspec.profile.schema import Profile
from selfspec.speculation.drafter import Drafter, Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import PayoffModel
from selfspec.types.draft_work import Work

KNOWN = 200.0  # plain decoding steps' time that what is expected of a way counts for
HOPE = 1.05  # times what is expected: a way that was not taken for long is tried again
MEMORY = 0.8  # of what is known beyond that is kept when the next sequence begins


@dataclass(slots=True)
class Route:
    """A way to draft: `expected` tokens in the time of a plain step, before any was decoded.

    `payoff` says what its rounds take.
    """

    drafter: Drafter
    payoff: PayoffModel
    expected: float = 1.0
    _time: float = field(init=False, default=0.0)
    _tokens: float = field(init=False, default=0.0)

    @property
    def rate(self) -> float:
        """Tokens in the time of a plain step, as far as they are known."""
        return (KNOWN * HOPE * self.expected + self._tokens) / (KNOWN + self._time)

    def see(self, outcome: Outcome) -> None:
        """A round was taken."""
        draft = outcome.draft
        self._time += self.payoff.price(draft.work) + self.payoff.rounds[1 + len(draft)]
        self._tokens += len(outcome.tokens)

    def fade(self) -> None:
        """Another sequence begins: what was seen counts for less."""
        self._time *= MEMORY
        self._tokens *= MEMORY


class Router:
    """Gives each sequence, when it begins, the route whose rate is highest; it keeps it to its end.

    Rates are of what rounds brought and what they are expected to take, not of a clock. A sequence with a seed takes
    the first route, and teaches nothing: what it drafts depends on no other. Raises `ValueError` for no route.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        if not routes:
            raise ValueError("expected at least one route")
        self.routes = tuple(routes)
        self._taken: dict[SequenceState, Route] = {}

    @property
    def hidden(self) -> Sequence[int]:
        """The layers whose streams any of the drafters reads."""
        return sorted({layer for route in self.routes for layer in route.drafter.hidden})

    @property
    def drafts(self) -> bool:
        """Whether any drafter ever proposes anything."""
        return any(route.drafter.drafts for route in self.routes)

    def max_work(self, limit: Limit) -> Work:
        """The dearest of the drafters' own, each by its outlook."""
        works = [(route.payoff, route.drafter.max_work(limit)) for route in self.routes]
        return max(works, key=lambda of: of[0].price(of[1]))[1]

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Choose a route."""
        route = self.routes[0]
        if not seq.sampler.seeded:
            for known in self.routes:
                known.fade()
            route = max(self.routes, key=lambda known: known.rate)
        self._taken[seq] = route
        route.drafter.begin(seq, prefill)

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Each sequence's own drafter's."""
        drafts = [NO_DRAFT] * len(seqs)
        for route in self.routes:
            mine = [i for i, seq in enumerate(seqs) if self._taken[seq] is route]
            if mine:
                found = route.drafter.propose([seqs[i] for i in mine], [limits[i] for i in mine])
                for i, draft in zip(mine, found, strict=True):
                    drafts[i] = draft
        return drafts

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Tell the sequence's drafter, and learn what the route brings."""
        route = self._taken[seq]
        if not seq.sampler.seeded:
            route.see(outcome)
        route.drafter.observe(seq, outcome)

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence."""
        if (route := self._taken.pop(seq, None)) is not None:
            route.drafter.end(seq)


def routed(profile: Profile, make: Callable[[Profile], Drafter]) -> Drafter:
    """What `make` gives for a profile; where there are further ways to draft, all of them, and a router."""
    if not profile.also:
        return make(profile)
    return Router(
        [Route(make(of), of.payoff, of.predicted.speedup if of.predicted else 1.0) for of in profile.alternatives]
    )


def calibrate(drafter: Drafter) -> None:
    """Before a sequence with a seed: let the guard that it will have learn what rounds cost here."""
    first = drafter.routes[0].drafter if isinstance(drafter, Router) else drafter
    if isinstance(first, Guard):
        first.calibrate()
