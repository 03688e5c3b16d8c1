"""The guard: a drafter that wraps another drafter and bounds the time that drafting can lose."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from selfspec.basics.machine import clock
from selfspec.runtime.device_rounds import PLAIN, RoundPlan, RoundPlanner
from selfspec.speculation.drafter import DelegatingDrafter, Drafter, Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.rounds import guide_draft
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import PayoffModel
from selfspec.types.draft_work import LOOKUP_CALL, LOOKUP_WORK, NO_WORK, DraftCall, Work, steps_of
from selfspec.types.methods import WIDEST_DRAFT

SHARE, START = 0.015, 1.65  # bound on the lost time: a share of plain decoding's time, and an allowance in plain rounds
FIRST_REST = 1.6  # assumed time of the first drafted round, drafting excluded, in plain rounds
WIDER = 1.5  # assumed time of the first round of a width, drafting excluded, in rounds of the next smaller width
WIDTHS = (4, 8, 16, WIDEST_DRAFT)  # drafted tokens up to which the times of rounds are estimated together
KNOWN, RECENT = 2, 5  # number of plain rounds before the first draft, and of latest plain rounds in the median
DRAFTED, LATELY = 8, 3  # numbers of latest drafted rounds: to estimate the next cost, and to detect a change of speed
PROBE = 128  # tokens after which a plain round is due
MOST = 20.0  # cap on a batch's slack, in plain rounds, so that time saved long ago cannot be lost now
CHANGED = 0.25  # relative change of verification time after which plain timings are discarded
COLD = 2.0  # most by which a first call takes longer than later ones, as what it reads is in no cache
STALLED = 2.0  # most that a round is charged, in what as much work is known to take: the rest was the machine's
LOOKUP = 0.25  # assumed time of the first lookup, in plain rounds
PATIENCE = 32  # rounds without a draft, because of recorded times alone, after which these are discarded


NOTHING = Limit(0, 0)
UNKNOWN_WORK: Work = ((DraftCall("draft"), 1),)  # assumed if a drafter reports no work


@dataclass(slots=True)
class _Account:
    """Account of a sequence (or a whole batch): the time that drafting has gained, and the tokens since a plain round.

    `slack`: time gained minus time lost, plus the `SHARE` of plain decoding's time that may be lost. Its unit is
    seconds if rounds are timed, and plain rounds if the payoff model computes their cost. `since_plain`: tokens emitted
    since the last plain round.
    """

    slack: float = 0.0
    since_plain: float = 0.0


@dataclass(slots=True)
class _Round:
    """The current round: its clock reading at the beginning, and the sequences in `left` whose accounts are open."""

    begun: float
    round_times: _RoundTimes
    left: set[SequenceState]
    drafting: float = 0.0  # seconds; without a draft, of the search for one
    work: Work | None = None  # work of all drafts together; None if nothing was drafted
    drafted: int = 0  # drafted tokens in the verification pass
    took: float | None = None  # seconds of the round, set when the first sequence is observed
    charged: float = 0.0  # those that count as taken, set then too
    denied: bool = False  # whether the bound left no time for a draft pass
    guided: bool = False  # whether guides force tokens in this round, which make it wider than its drafts do
    plan: RoundPlan = PLAIN  # if the round was planned for the device


@dataclass(slots=True)
class _RoundTimes:
    """Recent times: of plain rounds, of each kind of draft call, and of drafted rounds without drafting.

    `sequences`: the batch size of these rounds. `plain` and `step`, their median, are in seconds; the other times in
    steps, so that they hold where the context or the machine's speed has changed since. `parts`: one call for one
    sequence. `rest`: a drafted round minus its drafting, by the width in `WIDTHS` that holds a sequence's draft.
    `denied`: rounds since the last draft in which these times alone left no time for one, of `patience` at most.
    """

    sequences: int = 1
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    step: float = 0.0  # median of `plain`
    parts: dict[DraftCall, deque[float]] = field(default_factory=dict)
    rest: dict[int, deque[float]] = field(default_factory=dict)
    lately: dict[int, deque[float]] = field(default_factory=dict)  # latest `rest`, by number of drafted tokens
    then: dict[int, float] = field(default_factory=dict)  # first median of `lately` since the last plain round
    denied: int = 0
    patience: int = PATIENCE
    estimates: dict[DraftCall | int, float] = field(default_factory=dict)  # by call and width, until a round is added

    def see_plain(self, seconds: float) -> None:
        """Add the time of a plain round."""
        self.plain.append(seconds)
        self.step = _median(self.plain)
        self.lately.clear()
        self.then.clear()

    def see_drafted(self, work: Work, drafting: float, rest: float, drafted: int = 0, *, denied: bool = False) -> None:
        """Add the times of a drafted round: `drafting` seconds for `work`, and `rest` seconds for everything else.

        `drafting` is divided among the calls of `work` in proportion to their known costs. If `rest` for this number of
        `drafted` tokens has changed by more than `CHANGED` since the last plain round, the plain timings are discarded.
        If `rest` is below the time of a plain round, it is recorded as a plain round too, because a plain round has
        fewer rows and cannot take longer. `denied`: whether no more than a lookup was allowed.
        """
        if not self.step:
            return  # nothing to compare with
        if not denied:
            self.denied = 0
            if drafting + rest <= (1 + FIRST_REST) * self.step:
                self.patience = PATIENCE
        shares = {part: self.part(part) for part, _ in work}
        expected = sum(calls * shares[part] for part, calls in work)
        for part, calls in work:
            share = shares[part] / expected if expected > 0 else 1 / (calls * len(work))
            self.parts.setdefault(part, deque(maxlen=DRAFTED)).append(drafting * share / self.step)
        width = _width(-(-drafted // self.sequences))
        self.rest.setdefault(width, deque(maxlen=DRAFTED)).append(rest / self.step)
        self.estimates.clear()
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

    def deny(self, seconds: float) -> None:
        """Count a round that has no draft although the first draft of all would have fitted in `seconds`.

        After `patience` such rounds the times of drafted rounds are discarded, since a machine that was busy when the
        last drafts were timed would otherwise have none for ever. `patience` then doubles, until a draft is as fast as
        was assumed of the first.
        """
        if not self.rest or seconds < (1 + FIRST_REST) * self.step:
            return
        self.denied += 1
        if self.denied >= self.patience:
            self.parts.clear()
            self.rest.clear()
            self.estimates.clear()
            self.denied, self.patience = 0, 2 * self.patience

    def part(self, part: DraftCall) -> float:
        """Return the seconds of one draft call for one sequence; before the first such call, of a plain round.

        A lookup runs no model: it is assumed to take `LOOKUP` of that. What a first call reads is in no cache: of the
        second, no more is expected than was assumed of the first.
        """
        if part not in self.estimates:
            assumed = LOOKUP if part == LOOKUP_CALL else 1.0
            self.estimates[part] = _expected(self.parts.get(part, ()), assumed / self.sequences)
        return self.step * self.estimates[part]

    def draft(self, work: Work) -> float:
        """Return the seconds of a draft with this work."""
        return sum(calls * self.part(part) for part, calls in work)

    def most_seconds(self, work: Work, drafted: int) -> float:
        """Return the seconds that a round with this work took at most; infinity if it was not timed twice.

        `drafted`: the drafted tokens of all sequences. One disturbed round is left out, as in all estimates.
        """
        rest = self.rest.get(_width(-(-drafted // self.sequences)))
        if rest is None or len(rest) < 2 or any(len(self.parts.get(part, ())) < 2 for part, _ in work):
            return math.inf
        return self.draft(work) + self.step * _second_highest(rest)

    def seconds_besides_drafting(self, nodes: int = 1) -> float:
        """Return the seconds of a round with drafts of `nodes` tokens less its drafting.

        A wider round takes no less than a narrower one. Before the first round of a width, the value is assumed: at
        most that of a wider round that was timed. No more is expected of the second.
        """
        widest, steps = _width(nodes), 0.0
        if widest not in self.estimates:
            for width in WIDTHS[: WIDTHS.index(widest)]:
                if width in self.rest:
                    steps = max(steps, _expected(self.rest[width], max(FIRST_REST, WIDER * steps)))
            wider = [_expected(times, math.inf) for width, times in self.rest.items() if width > widest]
            assumed = max(steps, min([max(FIRST_REST, WIDER * steps), *wider]))
            self.estimates[widest] = max(steps, _expected(self.rest.get(widest, ()), assumed))
        return self.step * self.estimates[widest]


class Guard(DelegatingDrafter):
    """A drafter that limits the drafts of another `drafter`, so that the time lost to drafting stays within a bound.

        seconds lost to drafting + this round's highest cost - t <= 1.65 t + 0.015 t (tokens + 1),   t: plain round

    So decoding takes at most 5% longer than plain decoding over 100 tokens, and 3% over 500, however wrong the drafts
    are, if a plain step takes milliseconds: the guard itself takes some 30 us a round, 6% of half a millisecond.
    The formula alone allows 3.2% and 1.8%; the remainder covers the guard, and rounds that take longer than estimated.

    A drafted round of s seconds that emits n tokens loses s - n t seconds, a gain if negative. A plain round loses
    nothing. t is the median of the latest plain rounds. A round counts at most twice what rounds with the same work
    took lately: when the machine stalls, plain decoding would have stalled too. Rounds are plain at the beginning (two
    rounds), after 128 tokens without a plain round, where the bound leaves no time for a draft, and after the
    verification time of a number of tokens has changed (two rounds). Where there is no time for a draft pass, tokens
    may still be looked up. Recorded times that alone leave no time for a draft pass are discarded after 32 rounds, then
    after 64, and so on. If the rest of a drafted round takes less than t, that rest counts as a plain round. The
    estimated time of a draft is the sum over its calls, each at the second highest of that call's recent times; a
    single time of at most twice what was assumed counts as no more than was assumed, because a first call reads from no
    cache. If the machine's speed varies, t follows its slower times. In a batch the bound holds for each sequence,
    against plain rounds of the same batch size; after `bound_together` it holds for the batch as a whole.

    For a seeded sequence nothing depends on `clock`: `payoff` gives the cost of a round, and without a `payoff` its
    drafts are not limited. `measure_payoff` measures a payoff model on this machine (None: not possible); `calibrate`
    calls `measure_payoff` once, before the first seeded sequence. All else is delegated to the drafter.

    A round on the device is planned before the last one was read, which is then taken to lose all that it can. It takes
    the time between two reads; of that, what exceeds a plain round counts as drafting.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        payoff: PayoffModel | None = None,
        measure_payoff: Callable[[], PayoffModel | None] | None = None,
        clock: Callable[[], float] = clock,
    ) -> None:
        super().__init__(drafter)
        self.payoff = payoff
        self._together: _Account | None = None
        self._measure_payoff = measure_payoff
        self._clock = clock
        self._round_times: dict[int, _RoundTimes] = {}  # by batch size
        self._accounts: dict[SequenceState, _Account] = {}
        self._round: _Round | None = None
        self._planned: deque[_Round] = deque()  # rounds on the device that were planned and not observed
        self._last_read = 0.0  # the clock's reading when the last of them was observed

    def calibrate(self) -> None:
        """Measure the round costs on this machine, on the first call only. Raises what `measure_payoff` raises."""
        if self._measure_payoff is not None:
            self.payoff, self._measure_payoff = self._measure_payoff() or self.payoff, None

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Open an account for the sequence."""
        self._planned.clear()  # discarded, and the sequence's first round is not planned
        self._accounts[seq] = _Account()
        self.drafter.begin(seq, prefill)

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return the drafter's drafts, limited to the size that the bound allows; a draft may be empty."""
        self._planned.clear()  # a round on the host: those that were planned have been discarded
        timed = {seq for seq in self._accounts if self._timed(seq)}
        guided = any(len(guide_draft(seq, Limit(1))) for seq in self._accounts)
        self._round = _Round(self._clock(), self.round_times, timed, guided=guided) if timed else None
        seconds = self._to_spend(timed)
        if seconds <= self.round_times.seconds_besides_drafting() and len(timed) == len(self._accounts):
            self.round_times.deny(seconds)
            return [NO_DRAFT] * len(seqs)  # most rounds end here if drafts lose time, so this exit must be cheap
        share = 1 / max(1, len(timed.intersection(seqs)))
        allowed = [self._allowed(seq, limit, seconds, share) for seq, limit in zip(seqs, limits, strict=True)]
        may = [i for i, limit in enumerate(allowed) if limit.depth > 0 or limit.lookup > 0]
        drafts, denied = [NO_DRAFT] * len(seqs), not any(limit.depth > 0 for limit in allowed)
        if denied:
            self.round_times.deny(seconds)
        asked = self._clock()
        if may:
            proposed = self.drafter.propose([seqs[i] for i in may], [allowed[i] for i in may])
            for i, draft in zip(may, proposed, strict=True):
                drafts[i] = draft
        if self._round is not None:
            self._round.work = _sum([draft for draft in drafts if len(draft)])
            self._round.drafting = self._clock() - (asked if self._round.work is None else self._round.begun)
            self._round.drafted, self._round.denied = sum(map(len, drafts)), denied
        return drafts

    def _allowed(self, seq: SequenceState, limit: Limit, seconds: float, share: float) -> Limit:
        """Return the largest draft that the bound allows, and the most tokens to look up, where that is more."""

        def within(limit: Limit) -> Limit:
            return self._by_clock(seconds, limit, share) if self._timed(seq) else self._by_payoff(seq, limit)

        largest, most = within(limit), min(limit.depth, limit.nodes)
        if largest.depth < most and self.drafter.max_work(Limit(0, lookup=most)) == LOOKUP_WORK:
            return largest._replace(lookup=within(Limit(0, limit.nodes, most)).lookup)
        return largest

    def plan_round(self, seqs: Sequence[SequenceState], limit: Limit, *, ahead: bool) -> RoundPlan | None:
        """Return the drafter's plan of a round on the device, limited to the length that each sequence's bound allows.

        All sequences of a round draft the same number of tokens.
        """
        if not isinstance(self.drafter, RoundPlanner) or any(seq.continuation is not None for seq in seqs):
            return None  # a guided round runs on the host
        if not ahead:
            self._planned.clear()
        timed, begun = {seq for seq in seqs if self._timed(seq)}, self._clock()
        if timed:
            seconds = self._to_spend(timed) - sum(map(self._seconds_lost, self._planned))
            asked, limit = limit, self._by_clock(seconds, limit, 1 / len(seqs))
            if asked.depth and not limit.depth:
                self.round_times.deny(seconds)
        plans = [planned.plan for planned in self._planned]
        for seq in set(seqs) - timed:
            lost = sum(self._steps_lost(seq, steps_of(plan.length), plan.nodes, 1) for plan in plans)
            limit = self._by_payoff(seq, limit, lost=lost)
        plan = self.drafter.plan_round(seqs, limit, ahead=ahead)
        if plan is not None:
            count = len(seqs)
            work = tuple((call, count * calls) for call, calls in steps_of(plan.length)) or None
            nodes = plan.nodes * count
            self._planned.append(_Round(begun, self.round_times, set(seqs), work=work, drafted=nodes, plan=plan))
        return plan

    def _seconds_lost(self, planned: _Round) -> float:
        """Return the seconds that a round on the device loses if each sequence emits one token."""
        times = planned.round_times
        if planned.work is None:
            return 0.0
        return times.draft(planned.work) + times.seconds_besides_drafting(planned.plan.nodes) - (1 + SHARE) * times.step

    def _steps_lost(self, seq: SequenceState, work: Work | None, drafted: int, tokens: int) -> float:
        """Return the plain steps that a round with this draft loses by the payoff model, if it emits `tokens`."""
        if self.payoff is None:
            return 0.0
        payoff = self.payoff.at(len(seq.tokens))
        return payoff.cost(work or NO_WORK) + payoff.rounds[1 + drafted] - (1 + SHARE) * tokens

    def bound_together(self, together: bool) -> None:
        """Set whether the bound holds for the batch as a whole, by the clock alone, or for each sequence.

        If `together`, seeded sequences are timed too: under rule `match` drafts do not affect the text.
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
        """Return the seconds that a drafted round may take without breaking any sequence's bound."""
        if not timed:
            return 0.0
        round_times, accounts = self.round_times, [self._account(seq) for seq in timed]
        if len(round_times.plain) < KNOWN or any(account.since_plain >= PROBE for account in accounts):
            return 0.0
        left = min(account.slack for account in accounts)
        return left + (1 + SHARE + START) * round_times.step

    def _by_clock(self, seconds: float, limit: Limit, share: float = 1.0) -> Limit:
        """Return the deepest draft that fits a round of `seconds`, and of equally deep ones the widest.

        `share`: the share of the round's drafting that is the sequence's. Of a limit without `depth`, the most lookup
        tokens that fit.
        """
        round_times, best, tokens = self.round_times, NOTHING, 0
        sized = _sizing(limit)
        least = round_times.draft(self.drafter.max_work(sized(1, 1)) or UNKNOWN_WORK)
        if share * (seconds - round_times.seconds_besides_drafting()) < least:
            return NOTHING  # not even the smallest draft fits
        for nodes in (limit.nodes, *(width for width in reversed(WIDTHS) if width < limit.nodes)):
            left = share * (seconds - round_times.seconds_besides_drafting(nodes))

            def fits(depth: int, nodes: int = nodes, left: float = left) -> bool:
                return round_times.draft(self.drafter.max_work(sized(depth, nodes)) or UNKNOWN_WORK) <= left

            deepest = min(limit.depth or limit.lookup, nodes)
            if left > 0 and fits(1) and (depth := _most(fits, deepest)) > tokens:
                best, tokens = sized(depth, nodes), depth
            if tokens == deepest:
                break
        return best

    def _by_payoff(self, seq: SequenceState, limit: Limit, *, lost: float = 0.0) -> Limit:
        """Return the deepest draft that the bound allows by the payoff model, or the most lookup tokens.

        `lost`: plain steps lost beforehand.
        """
        if self.payoff is None:
            return limit
        payoff, left = self.payoff.at(len(seq.tokens)), self._accounts[seq].slack - lost + 1 + SHARE + START
        sized = _sizing(limit)

        def fits(depth: int, nodes: int) -> bool:
            return payoff.cost(self.drafter.max_work(sized(depth, nodes))) + payoff.rounds[1 + nodes] <= left

        depth = _most(lambda n: fits(n, n), min(limit.depth or limit.lookup, limit.nodes))
        return sized(depth, depth + _most(lambda n: fits(depth, depth + n), limit.nodes - depth)) if depth else NOTHING

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Add the time that the round gained or lost to the sequence's account, and let the drafter learn."""
        account, draft, tokens = self._account(seq), outcome.draft, len(outcome.tokens)
        planned = self._planned[0] if self._planned and seq in self._planned[0].left else None
        if not self._timed(seq):
            drafted = len(draft) if planned is None else planned.plan.nodes
            account.slack -= self._steps_lost(seq, draft.work, drafted, tokens)
        elif planned is not None:
            if planned.took is None:
                now = self._clock()
                planned.begun, self._last_read = max(planned.begun, self._last_read), now
                if planned.work is not None:
                    planned.drafting = max(now - planned.begun - planned.round_times.step, 0.0)
            self._settle(account, planned, tokens)
        elif self._round is not None and seq in self._round.left:  # otherwise no draft was requested
            self._settle(account, self._round, tokens)
            self._round.left.discard(seq)
        if planned is not None:
            self._leave(seq, planned)
        self.drafter.observe(seq, outcome)

    def _leave(self, seq: SequenceState, planned: _Round) -> None:
        """Take a sequence out of a round that was planned; without sequences, the round is over."""
        planned.left.discard(seq)
        if not planned.left:
            self._planned.remove(planned)

    def _settle(self, account: _Account, now: _Round, tokens: int) -> None:
        round_times, first = now.round_times, now.took is None
        share = 1.0 if self._together is None else 1 / round_times.sequences  # a sequence's share of the batch account
        took = now.took = self._clock() - now.begun if now.took is None else now.took
        if first and now.work is not None:
            now.charged = min(took, STALLED * round_times.most_seconds(now.work, now.drafted))
        if now.work is None:
            if first and not now.guided:
                round_times.see_plain(took - now.drafting)
            account.slack += share * (SHARE * round_times.step - now.drafting)
            account.since_plain = 0
            return
        rest = took - now.drafting
        account.slack += share * ((1 + SHARE) * tokens * min(round_times.step, rest) - now.charged)
        if self._together is not None:
            account.slack = min(account.slack, MOST * round_times.step)
        account.since_plain += share * tokens
        if first and not now.guided:
            round_times.see_drafted(now.work, now.drafting, rest, now.drafted, denied=now.denied)

    def end(self, seq: SequenceState) -> None:
        """Close the sequence's account."""
        self._accounts.pop(seq, None)
        if self._round is not None:  # after an error in a round, the sequence may begin again
            self._round.left.discard(seq)
        for planned in list(self._planned):
            self._leave(seq, planned)
        self.drafter.end(seq)


def _sizing(limit: Limit) -> Callable[[int, int], Limit]:
    """Return the constructor of limits from tokens and nodes: of drafts, or of lookups if `limit` has no depth."""
    return Limit if limit.depth else lambda tokens, nodes: Limit(0, nodes, tokens)


def _sum(drafts: Sequence[Draft]) -> Work | None:
    """Return the total work of the drafts; None without drafts."""
    if len(drafts) < 2:
        return (drafts[0].work or UNKNOWN_WORK) if drafts else None
    total: dict[DraftCall, int] = {}
    for draft in drafts:
        for part, calls in draft.work or UNKNOWN_WORK:
            total[part] = total.get(part, 0) + calls
    return tuple(total.items())


def _width(nodes: int) -> int:
    """Return the smallest of `WIDTHS` that a draft of `nodes` tokens fits; the largest if it fits none."""
    return next((width for width in WIDTHS if nodes <= width), WIDTHS[-1])


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


def _expected(seconds: Sequence[float] | deque[float], assumed: float) -> float:
    """Return the second highest of recent times, and without any the `assumed` one.

    A single time that is at most `COLD` times the assumed one counts as no more than that.
    """
    if len(seconds) > 1:
        return _second_highest(seconds)
    return assumed if not seconds or assumed < seconds[0] <= COLD * assumed else seconds[0]


def _second_highest(seconds: Sequence[float] | deque[float]) -> float:
    """Return the second highest of several times: one disturbed measurement must not stop drafting."""
    return sorted(seconds)[-2]
