"""The guard: a drafter around a drafter that lets it draft only while the bet is bounded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from selfspec.speculation.drafter import Drafter, Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import PayoffModel
from selfspec.types.draft_work import DraftCall, Work

SHARE, START = 0.015, 1.65  # of plain decoding's time, and plain steps, that drafting may lose
FIRST_REST = 1.6  # plain rounds that the first draft's verification is taken to last
KNOWN, RECENT = 2, 5  # plain rounds before the first draft, and of how many the median is taken
DRAFTED, LATELY = 8, 3  # recent rounds by which the next one's cost, and a change of the machine, is judged
PROBE = 128  # tokens after which a plain round is due
MOST = 20.0  # plain rounds that a batch may be ahead: what it gained long ago is not to be lost now
CHANGED = 0.25  # of what verifying took, after which the machine is taken to be another


NOTHING = Limit(0, 0)
UNNAMED: Work = ((DraftCall("draft"), 1),)  # what a draft took whose drafter does not say


@dataclass(slots=True)
class _Account:
    """Of one sequence: seconds that drafting has gained (or lost) with its share; tokens since a plain round."""

    slack: float = 0.0
    since_plain: float = 0.0


@dataclass(slots=True)
class _Round:
    """The round under way: whose accounts are still to be settled, and what it has taken so far."""

    begun: float
    prices: _Prices
    left: set[SequenceState]
    drafting: float = 0.0  # seconds
    work: Work | None = None  # of all drafts; None: nothing was drafted
    drafted: int = 0  # tokens that are verified
    took: float | None = None  # seconds, known once the first sequence is observed


@dataclass(slots=True)
class _Prices:
    """Seconds of a plain round, and what drafted rounds took for each part of their work and for the rest, lately.

    `sequences`: how many take these rounds together.
    """

    sequences: int = 1
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    step: float = 0.0  # a plain round, by the median
    parts: dict[DraftCall, deque[float]] = field(default_factory=dict)
    rest: deque[float] = field(default_factory=lambda: deque(maxlen=DRAFTED))
    lately: dict[int, deque[float]] = field(default_factory=dict)  # the same by how many drafted tokens there were
    then: dict[int, float] = field(default_factory=dict)  # likewise, what verifying took after the last plain round

    def see_plain(self, seconds: float) -> None:
        """A plain round took so long."""
        self.plain.append(seconds)
        self.step = _median(self.plain)
        self.lately.clear()
        self.then.clear()

    def see_drafted(self, work: Work, drafting: float, rest: float, drafted: int = 0) -> None:
        """Making a round's drafts took so long for this work, and the rest of the round so long.

        Several parts share the time as their prices so far say. Where verifying as many tokens takes longer or shorter
        than it did, what a plain round took is no longer known; where it takes less than a plain round, which has fewer
        rows, such a one takes no longer than that.
        """
        shares = {part: self.part(part) for part, _ in work}
        expected = sum(calls * shares[part] for part, calls in work)
        for part, calls in work:
            share = shares[part] / expected if expected > 0 else 1 / (calls * len(work))
            self.parts.setdefault(part, deque(maxlen=DRAFTED)).append(drafting * share)
        self.rest.append(rest)
        if rest < self.step:
            self.plain.append(rest)
            self.step = _median(self.plain)
        lately = self.lately.setdefault(drafted, deque(maxlen=LATELY))
        lately.append(rest)
        if len(lately) == LATELY:
            now = _median(lately)
            then = self.then.setdefault(drafted, now)
            if not 1 / (1 + CHANGED) < now / then < 1 + CHANGED:
                self.plain.clear()

    def part(self, part: DraftCall) -> float:
        """Seconds of one call of a part for one sequence; before the first, a guess."""
        known = self.parts.get(part)
        return _dear(known) if known else self.step / self.sequences

    def draft(self, work: Work) -> float:
        """Seconds of a draft that takes this work."""
        return sum(calls * self.part(part) for part, calls in work)

    def beside_drafts(self) -> float:
        """Seconds of a drafted round without its drafts; before the first, a guess."""
        return _dear(self.rest) if self.rest else FIRST_REST * self.step


class Guard:
    """Lets `drafter` draft, and as much, only while that cannot cost more than the bound.

        seconds lost to drafting + this round's dearest cost - t <= 1.65 t + 0.015 t (tokens + 1),   t a plain round's

    So decoding takes at most 5% longer than plain decoding over 100 tokens, and 3% over 500, however wrong the drafts
    are, where a plain step takes milliseconds: the guard's own 10 us a round are 2% of half of one. What is spared of
    that is for a round that is dearer than those before it, and for the guard itself. What drafting loses in a round is
    what the round took less t for each of its tokens; a plain round loses nothing. t is the median of recent plain
    rounds: the first two rounds, one after 128 tokens without, those that the bound forces, and two where verifying
    as many tokens takes longer or shorter than it did; verifying that takes less than t counts as one. A draft is
    judged by what its work costs, each part at the second dearest of its recent calls. Of a machine that changes
    its speed, t is that of its slower times. Of sequences that take rounds together each keeps the bound, against
    plain rounds of as many; with `bound_together` all of them together do.

    With a seeded sampler nothing depends on `clock`: rounds cost what `payoff` says, for every row that is verified,
    and without one nothing is bounded. `here` gives one that is right where it is called, and is asked once, by
    `look_here` before the first such sequence. Everything else is the drafter's own.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        payoff: PayoffModel | None = None,
        here: Callable[[], PayoffModel | None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter = drafter
        self.payoff = payoff
        self._together: _Account | None = None
        self._here = here
        self._clock = clock
        self._prices: dict[int, _Prices] = {}  # by how many sequences take rounds together
        self._accounts: dict[SequenceState, _Account] = {}
        self._round: _Round | None = None

    @property
    def hidden(self) -> Sequence[int]:
        """The layers whose streams the drafter reads."""
        return self.drafter.hidden

    @property
    def drafts(self) -> bool:
        """Whether the drafter ever proposes anything."""
        return self.drafter.drafts

    def calibrate(self) -> None:
        """Learn what rounds cost here, unless it is known; raises as `here` does."""
        if self._here is not None:
            self.payoff, self._here = self._here() or self.payoff, None

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """A new account."""
        self._accounts[seq] = _Account()
        self.drafter.begin(seq, prefill)

    def max_work(self, limit: Limit) -> Work:
        """The drafter's own."""
        return self.drafter.max_work(limit)

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """The drafter's, no larger than the bound allows; none where it allows none."""
        timed = {seq for seq in self._accounts if self._timed(seq)}
        self._round = _Round(self._clock(), self.prices, timed) if timed else None
        seconds = self._to_spend(timed)
        if seconds <= 0 and len(timed) == len(self._accounts):
            return [NO_DRAFT] * len(seqs)  # as most rounds where drafts lose: such a one is to cost little
        seconds /= max(1, len(timed.intersection(seqs)))
        allowed = [
            self._by_clock(seconds, limit) if self._timed(seq) else self._by_payoff(self._accounts[seq], limit)
            for seq, limit in zip(seqs, limits, strict=True)
        ]
        may = [i for i, limit in enumerate(allowed) if limit.depth > 0]
        drafts = [NO_DRAFT] * len(seqs)
        if may:
            found = self.drafter.propose([seqs[i] for i in may], [allowed[i] for i in may])
            for i, draft in zip(may, found, strict=True):
                drafts[i] = draft
        if self._round is not None:
            self._round.drafting = self._clock() - self._round.begun
            self._round.work = _sum([draft for draft in drafts if len(draft)])
            self._round.drafted = sum(map(len, drafts))
        return drafts

    def bound_together(self, together: bool) -> None:
        """Bound what drafts cost all sequences that take rounds together, not each of them, and by the clock alone.

        What is drafted with a seed, too, does not matter to its text under rule `match`.
        """
        self._together = _Account() if together else None

    def _timed(self, seq: SequenceState) -> bool:
        return self._together is not None or not seq.sampler.seeded

    def _account(self, seq: SequenceState) -> _Account:
        return self._together or self._accounts[seq]

    @property
    def prices(self) -> _Prices:
        """What rounds of as many sequences as there are now have taken."""
        sequences = len(self._accounts) or 1
        known = self._prices.get(sequences)
        if known is None:
            known = self._prices[sequences] = _Prices(sequences)
        return known

    def _to_spend(self, timed: set[SequenceState]) -> float:
        """Seconds that drafting may take in this round, so that each of the sequences keeps its bound."""
        if not timed:
            return 0.0
        prices, accounts = self.prices, [self._account(seq) for seq in timed]
        if len(prices.plain) < KNOWN or any(account.since_plain >= PROBE for account in accounts):
            return 0.0
        left = min(account.slack for account in accounts)
        return left + (1 + SHARE + START) * prices.step - prices.beside_drafts()

    def _by_clock(self, seconds: float, limit: Limit) -> Limit:
        prices = self.prices

        def fits(depth: int) -> bool:
            work = self.drafter.max_work(Limit(depth, limit.nodes)) or UNNAMED
            return prices.draft(work) <= seconds

        return Limit(_most(fits, limit.depth), limit.nodes) if seconds > 0 and fits(1) else NOTHING

    def _by_payoff(self, account: _Account, limit: Limit) -> Limit:
        payoff = self.payoff
        if payoff is None:
            return limit
        left = account.slack + 1 + SHARE + START

        def fits(depth: int, nodes: int) -> bool:
            return payoff.price(self.drafter.max_work(Limit(depth, nodes))) + payoff.rounds[1 + nodes] <= left

        depth = _most(lambda n: fits(n, n), min(limit.depth, limit.nodes))
        return Limit(depth, depth + _most(lambda n: fits(depth, depth + n), limit.nodes - depth)) if depth else NOTHING

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Settle the sequence's account of the round."""
        account, draft, tokens = self._account(seq), outcome.draft, len(outcome.tokens)
        if not self._timed(seq):
            if self.payoff is not None:
                took = self.payoff.price(draft.work) + self.payoff.rounds[1 + len(draft)]
                account.slack += (1 + SHARE) * tokens - took
        elif self._round is not None and seq in self._round.left:  # else the loop asked for no draft
            self._settle(account, self._round, tokens)
            self._round.left.discard(seq)
        self.drafter.observe(seq, outcome)

    def _settle(self, account: _Account, now: _Round, tokens: int) -> None:
        prices, first = now.prices, now.took is None
        share = 1.0 if self._together is None else 1 / prices.sequences  # of the account that it settles
        took = now.took = self._clock() - now.begun if now.took is None else now.took
        if now.work is None:
            if first:
                prices.see_plain(took)
            account.slack += share * SHARE * prices.step
            account.since_plain = 0
            return
        rest = took - now.drafting
        account.slack += share * ((1 + SHARE) * tokens * min(prices.step, rest) - took)
        if self._together is not None:
            account.slack = min(account.slack, MOST * prices.step)
        account.since_plain += share * tokens
        if first:
            prices.see_drafted(now.work, now.drafting, rest, now.drafted)

    def end(self, seq: SequenceState) -> None:
        """Close the account."""
        self._accounts.pop(seq, None)
        self.drafter.end(seq)


def _sum(drafts: Sequence[Draft]) -> Work | None:
    """The work of all drafts together; None where there is no draft."""
    if len(drafts) < 2:
        return (drafts[0].work or UNNAMED) if drafts else None
    total: dict[DraftCall, int] = {}
    for draft in drafts:
        for part, calls in draft.work or UNNAMED:
            total[part] = total.get(part, 0) + calls
    return tuple(total.items())


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number from 0 to `limit` that fits, where whatever is smaller than one that fits does too."""
    if limit < 1 or fits(limit):
        return max(limit, 0)
    low = 0
    while limit - low > 1:
        middle = (low + limit) // 2
        low, limit = (middle, limit) if fits(middle) else (low, middle)
    return low


def _median(seconds: Sequence[float] | deque[float]) -> float:
    """The lower of both where there are two."""
    return sorted(seconds)[(len(seconds) - 1) // 2]


def _dear(seconds: deque[float]) -> float:
    """The second dearest, or the only one: one that was disturbed is not to stop all others."""
    return sorted(seconds)[-min(2, len(seconds))]
