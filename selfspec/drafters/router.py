"""Router between several drafters of one model: each sequence takes the drafter with the highest rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from selfspec.drafters.guard import Guard
from selfspec.profile.schema import Profile
from selfspec.speculation.drafter import DelegatingDrafter, Drafter, Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import PayoffModel
from selfspec.types.draft_work import Work

KNOWN = 200.0  # weight of a route's expected rate, in plain decoding steps
HOPE = 1.05  # optimism factor on the expected rate, so that a route that was not taken for long is tried again
MEMORY = 0.8  # decay of the observed time and tokens when the next sequence begins


@dataclass(slots=True)
class Route:
    """A drafter that a router can choose; `payoff`: the costs of the drafter's rounds.

    `expected`: the prior of the route's rate, in tokens emitted in the time of a plain step.
    """

    drafter: Drafter
    payoff: PayoffModel
    expected: float = 1.0
    _time: float = field(init=False, default=0.0)
    _tokens: float = field(init=False, default=0.0)

    @property
    def rate(self) -> float:
        """Estimated tokens in the time of a plain step, from the prior and the observed rounds."""
        return (KNOWN * HOPE * self.expected + self._tokens) / (KNOWN + self._time)

    def see(self, outcome: Outcome, keys: int) -> None:
        """Add a round's cost at a context length of `keys` tokens, and the tokens that it emitted."""
        draft, payoff = outcome.draft, self.payoff.at(keys)
        self._time += payoff.cost(draft.work) + payoff.rounds[1 + len(draft)]
        self._tokens += len(outcome.tokens)

    def fade(self) -> None:
        """Decay the observations when another sequence begins."""
        self._time *= MEMORY
        self._tokens *= MEMORY


class Router:
    """Drafter that assigns each sequence, when it begins, the route with the highest rate, for all its rounds.

    Rates divide emitted tokens by modelled round costs, not by a clock. A seeded sequence takes the first route and
    updates no rate, so its drafts depend on no other sequence. Raises `ValueError` if `routes` is empty.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        if not routes:
            raise ValueError("expected at least one route")
        self.routes = tuple(routes)
        self._taken: dict[SequenceState, Route] = {}

    @property
    def hidden(self) -> Sequence[int]:
        """The layers whose hidden states any of the drafters reads."""
        return sorted({layer for route in self.routes for layer in route.drafter.hidden})

    @property
    def drafts(self) -> bool:
        """Whether any drafter ever proposes a token."""
        return any(route.drafter.drafts for route in self.routes)

    def max_work(self, limit: Limit) -> Work:
        """Return the most expensive of the drafters' `max_work`, by the payoff model of each route."""
        works = [(route.payoff, route.drafter.max_work(limit)) for route in self.routes]
        return max(works, key=lambda pair: pair[0].cost(pair[1]))[1]

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Choose the sequence's route."""
        route = self.routes[0]
        if not seq.sampler.seeded:
            for known in self.routes:
                known.fade()
            route = max(self.routes, key=lambda known: known.rate)
        self._taken[seq] = route
        route.drafter.begin(seq, prefill)

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return each sequence's draft, from the drafter of its route."""
        drafts = [NO_DRAFT] * len(seqs)
        for route in self.routes:
            mine = [i for i, seq in enumerate(seqs) if self._taken[seq] is route]
            if mine:
                proposed = route.drafter.propose([seqs[i] for i in mine], [limits[i] for i in mine])
                for i, draft in zip(mine, proposed, strict=True):
                    drafts[i] = draft
        return drafts

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Report the round to the sequence's drafter, and update the route's rate."""
        route = self._taken[seq]
        if not seq.sampler.seeded and seq.continuation is None:  # what a guide forces is not the route's
            route.see(outcome, len(seq.tokens))
        route.drafter.observe(seq, outcome)

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence."""
        if (route := self._taken.pop(seq, None)) is not None:
            route.drafter.end(seq)


def make_router(profile: Profile, make: Callable[[Profile], Drafter]) -> Drafter:
    """Return `make(profile)` for a profile without alternatives (`also`); for any other profile, a `Router`.

    The router's first route has the drafter that `make` builds for the profile without its alternatives. Further routes
    have a drafter for each alternative.
    """
    if not profile.also:
        return make(profile)
    return Router(
        [
            Route(
                make(alternative), alternative.payoff, alternative.predicted.speedup if alternative.predicted else 1.0
            )
            for alternative in profile.alternatives
        ]
    )


def calibrate(drafter: Drafter) -> None:
    """Measure this machine's round costs for the guard of the first route, which seeded sequences take.

    Call `calibrate` before the first seeded sequence. A drafter without a guard is left unchanged.
    """
    while isinstance(drafter, DelegatingDrafter) and not isinstance(drafter, Guard):
        drafter = drafter.drafter  # such as one that is timed
    first = drafter.routes[0].drafter if isinstance(drafter, Router) else drafter
    if isinstance(first, Guard):
        first.calibrate()
