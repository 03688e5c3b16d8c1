"""The guard: a drafter that wraps another drafter and bounds the time that drafting can lose."""

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

SHARE, START = 0.015, 1.65  # what drafting may lose: a share of plain decoding's time, and a start in plain rounds
FIRST_REST = 1.6  # assumed cost of the first drafted round without its draft, in plain rounds
KNOWN, RECENT = 2, 5  # plain rounds before the first draft, and the window of their median
DRAFTED, LATELY = 8, 3  # windows of recent rounds that estimate the next cost, and that detect a change of speed
PROBE = 128  # tokens after which a plain round is due
MOST = 20.0  # cap on a batch's slack, in plain rounds, so that old gains cannot be lost now
CHANGED = 0.25  # relative change of verification time after which plain timings are discarded


NOTHING = Limit(0, 0)
UNKNOWN_WORK: Work = ((DraftCall("draft"), 1),)  # assumed work of a drafter that reports none


@dataclass(slots=True)
class _Account:
    """Account of a sequence (or a whole batch): time that drafting has gained, and tokens since a plain round.

    `slack`: seconds by the clock, or plain rounds by the payoff model; includes `SHARE` of plain decoding's time.
    """

    slack: float = 0.0
    since_plain: float = 0.0


@dataclass(slots=True)
class _Round:
    """Current round: the sequences whose accounts are not settled yet, and the time measured so far."""

    begun: float
    round_times: _RoundTimes
    left: set[SequenceState]
    drafting: float = 0.0  # seconds
    work: Work | None = None  # of all drafts; None if nothing was drafted
    drafted: int = 0  # drafted tokens in the verification pass
    took: float | None = None  # seconds of the round, set when the first sequence is observed


@dataclass(slots=True)
class _RoundTimes:
    """Recent times in seconds: plain rounds, each part of the drafting work, and drafted rounds less their drafting.

    `sequences`: the batch size of these rounds.
    """

    sequences: int = 1
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    step: float = 0.0  # median of `plain`
    parts: dict[DraftCall, deque[float]] = field(default_factory=dict)
    rest: deque[float] = field(default_factory=lambda: deque(maxlen=DRAFTED))
    lately: dict[int, deque[float]] = field(default_factory=dict)  # latest of `rest`, by number of drafted tokens
    then: dict[int, float] = field(default_factory=dict)  # `rest` after the last plain round, by drafted tokens

    def see_plain(self, seconds: float) -> None:
        """Add the time of a plain round."""
        self.plain.append(seconds)
        self.step = _median(self.plain)
        self.lately.clear()
        self.then.clear()

    def see_drafted(self, work: Work, drafting: float, rest: float, drafted: int = 0) -> None:
        """Add the times of a drafted round: `drafting` seconds for `work`, and `rest` seconds for everything else.

        The parts of the work share `drafting` in proportion to their known costs. If verification of the same number of
        tokens changes by more than `CHANGED`, the plain timings are discarded. If `rest` is below a plain round, it
        counts as a plain round, because a plain round has fewer rows and cannot take longer.
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
        """Return the seconds of one call of a part for one sequence; an assumed value before the first call."""
        known = self.parts.get(part)
        return _second_highest(known) if known else self.step / self.sequences

    def draft(self, work: Work) -> float:
        """Return the seconds of a draft with this work."""
        return sum(calls * self.part(part) for part, calls in work)

    def seconds_besides_drafting(self) -> float:
        """Return the seconds of a drafted round less its drafting; an assumed value before the first drafted round."""
        return _second_highest(self.rest) if self.rest else FIRST_REST * self.step


class Guard:
    """Wrapper that limits the drafts of `drafter` so that the time lost to drafting stays within a bound.

        seconds lost to drafting + this round's highest cost - t <= 1.65 t + 0.015 t (tokens + 1),   t: plain round

    So decoding takes at most 5% longer than plain decoding over 100 tokens, and 3% over 500, however wrong the drafts
    are, if a plain step takes milliseconds: the guard's own 10 us a round are 2% of half a millisecond. The remainder
    covers rounds more expensive than the earlier ones, and the guard itself. A drafted round loses its time less t for
    each of its tokens; a plain round loses nothing. t is the median of recent plain rounds: the first two rounds, one
    after 128 tokens without a plain round, those that the bound forces, and two after the verification time of the same
    number of tokens has changed; verification faster than t counts as a plain round. A draft is judged by the cost of
    its work, each part at the second highest of its recent costs. If the machine's speed varies, t follows its slower
    times. In a batch each sequence keeps the bound, against plain rounds of the same batch size; with
    `bound_together` the batch as a whole keeps it.

    With a seeded sampler nothing depends on `clock`: rounds cost what `payoff` says, every verified row included, and
    without a `payoff` nothing is bounded. `here` measures a local payoff model; `calibrate` calls it once, before the
    first seeded sequence. Everything else is delegated to the drafter.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        payoff: PayoffModel | None = None,
        measure_payoff: Callable[[], PayoffModel | None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter = drafter
        self.payoff = payoff
        self._together: _Account | None = None
        self._measure_payoff = measure_payoff
        self._clock = clock
        self._round_times: dict[int, _RoundTimes] = {}  # by batch size
        self._accounts: dict[SequenceState, _Account] = {}
        self._round: _Round | None = None

    @property
    def hidden(self) -> Sequence[int]:
        """The layers whose hidden states the drafter reads."""
        return self.drafter.hidden

    @property
    def drafts(self) -> bool:
        """Whether the drafter ever proposes a token."""
        return self.drafter.drafts

    def calibrate(self) -> None:
        """Measure the local round costs once; raises as `here` does."""
        if self._measure_payoff is not None:
            self.payoff, self._measure_payoff = self._measure_payoff() or self.payoff, None

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Open an account for the sequence."""
        self._accounts[seq] = _Account()
        self.drafter.begin(seq, prefill)

    def max_work(self, limit: Limit) -> Work:
        """Return the drafter's `max_work`."""
        return self.drafter.max_work(limit)

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return the drafter's drafts, limited to the size that the bound allows, which may be none."""
        timed = {seq for seq in self._accounts if self._timed(seq)}
        self._round = _Round(self._clock(), self.round_times, timed) if timed else None
        seconds = self._to_spend(timed)
        if seconds <= 0 and len(timed) == len(self._accounts):
            return [NO_DRAFT] * len(seqs)  # most rounds end here if drafts lose time, so this exit must be cheap
        seconds /= max(1, len(timed.intersection(seqs)))
        allowed = [
            self._by_clock(seconds, limit) if self._timed(seq) else self._by_payoff(self._accounts[seq], limit)
            for seq, limit in zip(seqs, limits, strict=True)
        ]
        may = [i for i, limit in enumerate(allowed) if limit.depth > 0]
        drafts = [NO_DRAFT] * len(seqs)
        if may:
            proposed = self.drafter.propose([seqs[i] for i in may], [allowed[i] for i in may])
            for i, draft in zip(may, proposed, strict=True):
                drafts[i] = draft
        if self._round is not None:
            self._round.drafting = self._clock() - self._round.begun
            self._round.work = _sum([draft for draft in drafts if len(draft)])
            self._round.drafted = sum(map(len, drafts))
        return drafts

    def bound_together(self, together: bool) -> None:
        """Bound the cost of drafting for the batch as a whole instead of for each sequence, and by the clock alone.

        Seeded sequences may be timed too: under rule `match` the drafts do not affect the text.
        """
        self._together = _Account() if together else None

    def _timed(self, seq: SequenceState) -> bool:
        return self._together is not None or not seq.sampler.seeded

    def _account(self, seq: SequenceState) -> _Account:
        return self._together or self._accounts[seq]

    @property
    def round_times(self) -> _RoundTimes:
        """The recorded times of rounds with the current number of sequences."""
        sequences = len(self._accounts) or 1
        known = self._round_times.get(sequences)
        if known is None:
            known = self._round_times[sequences] = _RoundTimes(sequences)
        return known

    def _to_spend(self, timed: set[SequenceState]) -> float:
        """Return the seconds that drafting may take in this round without breaking any sequence's bound."""
        if not timed:
            return 0.0
        round_times, accounts = self.round_times, [self._account(seq) for seq in timed]
        if len(round_times.plain) < KNOWN or any(account.since_plain >= PROBE for account in accounts):
            return 0.0
        left = min(account.slack for account in accounts)
        return left + (1 + SHARE + START) * round_times.step - round_times.seconds_besides_drafting()

    def _by_clock(self, seconds: float, limit: Limit) -> Limit:
        round_times = self.round_times

        def fits(depth: int) -> bool:
            work = self.drafter.max_work(Limit(depth, limit.nodes)) or UNKNOWN_WORK
            return round_times.draft(work) <= seconds

        return Limit(_most(fits, limit.depth), limit.nodes) if seconds > 0 and fits(1) else NOTHING

    def _by_payoff(self, account: _Account, limit: Limit) -> Limit:
        payoff = self.payoff
        if payoff is None:
            return limit
        left = account.slack + 1 + SHARE + START

        def fits(depth: int, nodes: int) -> bool:
            return payoff.cost(self.drafter.max_work(Limit(depth, nodes))) + payoff.rounds[1 + nodes] <= left

        depth = _most(lambda n: fits(n, n), min(limit.depth, limit.nodes))
        return Limit(depth, depth + _most(lambda n: fits(depth, depth + n), limit.nodes - depth)) if depth else NOTHING

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Settle the sequence's account of the round."""
        account, draft, tokens = self._account(seq), outcome.draft, len(outcome.tokens)
        if not self._timed(seq):
            if self.payoff is not None:
                took = self.payoff.cost(draft.work) + self.payoff.rounds[1 + len(draft)]
                account.slack += (1 + SHARE) * tokens - took
        elif self._round is not None and seq in self._round.left:  # otherwise the loop asked for no draft
            self._settle(account, self._round, tokens)
            self._round.left.discard(seq)
        self.drafter.observe(seq, outcome)

    def _settle(self, account: _Account, now: _Round, tokens: int) -> None:
        round_times, first = now.round_times, now.took is None
        share = 1.0 if self._together is None else 1 / round_times.sequences  # this sequence's share of a joint account
        took = now.took = self._clock() - now.begun if now.took is None else now.took
        if now.work is None:
            if first:
                round_times.see_plain(took)
            account.slack += share * SHARE * round_times.step
            account.since_plain = 0
            return
        rest = took - now.drafting
        account.slack += share * ((1 + SHARE) * tokens * min(round_times.step, rest) - took)
        if self._together is not None:
            account.slack = min(account.slack, MOST * round_times.step)
        account.since_plain += share * tokens
        if first:
            round_times.see_drafted(now.work, now.drafting, rest, now.drafted)

    def end(self, seq: SequenceState) -> None:
        """Close the sequence's account."""
        self._accounts.pop(seq, None)
        self.drafter.end(seq)


def _sum(drafts: Sequence[Draft]) -> Work | None:
    """Return the total work of the drafts; None without drafts."""
    if len(drafts) < 2:
        return (drafts[0].work or UNKNOWN_WORK) if drafts else None
    total: dict[DraftCall, int] = {}
    for draft in drafts:
        for part, calls in draft.work or UNKNOWN_WORK:
            total[part] = total.get(part, 0) + calls
    return tuple(total.items())


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 0 to `limit` that fits, by bisection; `fits` must be monotone."""
    if limit < 1 or fits(limit):
        return max(limit, 0)
    low = 0
    while limit - low > 1:
        middle = (low + limit) // 2
        low, limit = (middle, limit) if fits(middle) else (low, middle)
    return low


def _median(seconds: Sequence[float] | deque[float]) -> float:
    """Return the median, the lower of the two middle values for an even count."""
    return sorted(seconds)[(len(seconds) - 1) // 2]


def _second_highest(seconds: deque[float]) -> float:
    """Return the second highest time, or the only one: one disturbed measurement must not stop drafting."""
    return sorted(seconds)[-min(2, len(seconds))]
