"""The guard: a drafter around a drafter that lets it draft only while the bet is bounded."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from selfspec.facts.acceptance import Outlook
from selfspec.facts.limits import MOST_ROWS
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome, SequenceState
from selfspec.speculation.step import Step

SHARE, START = 0.015, 1.65  # of plain decoding's time, and plain steps, that drafting may lose
FIRST_REST = 1.6  # plain rounds that the first draft's verification is taken to last
KNOWN, RECENT = 2, 5  # plain rounds before the first draft, and of how many the median is taken
DRAFTED, LATELY = 8, 3  # recent rounds by which the next one's cost, and a change of the machine, is judged
PROBE = 128  # tokens after which a plain round is due
CHANGED = 0.25  # of what verifying took, after which the machine is taken to be another


@dataclass(slots=True)
class _Account:
    """Of one sequence: seconds that drafting has gained (or lost) with its share, and the round under way, if any."""

    slack: float = 0.0
    since_plain: int = 0
    begun: float | None = None
    drafting: float = 0.0  # seconds


@dataclass(slots=True)
class _Prices:
    """Seconds of a plain round, and of what drafted rounds took for each draft step and beside, as they were lately."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    usual: float = 0.0  # a plain round, by the median
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=DRAFTED))
    rest: deque[float] = field(default_factory=lambda: deque(maxlen=DRAFTED))
    then: float | None = None  # what verifying took about the last plain round

    def see_plain(self, seconds: float) -> None:
        """A plain round took so long."""
        self.plain.append(seconds)
        self.usual = statistics.median_low(self.plain)
        self.then = None

    def see_drafted(self, steps: int, drafting: float, rest: float) -> None:
        """A round drafted so many tokens and took so long, for drafting and beside.

        Where verifying takes longer or shorter than it did, or less than a plain round, which has fewer rows, what a
        plain round took is no longer known.
        """
        self.steps.append(drafting / steps)
        self.rest.append(rest)
        if rest < self.usual:
            self.plain.clear()
        if len(self.rest) >= LATELY:
            now = statistics.median_low(list(self.rest)[-LATELY:])
            self.then = now if self.then is None else self.then
            if not 1 / (1 + CHANGED) < now / self.then < 1 + CHANGED:
                self.plain.clear()

    def deepest(self, seconds: float) -> int:
        """The most draft steps of a round that is to take no longer than `seconds`; before the first, a guess."""
        step, rest = (_dear(self.steps), _dear(self.rest)) if self.steps else (self.usual, FIRST_REST * self.usual)
        return int((seconds - rest) / step) if step > 0 and seconds > rest else 0


class Guard:
    """Lets `drafter` draft, and as deep, only while that cannot cost more than the bound.

        seconds lost to drafting + this round's dearest cost - t <= 1.65 t + 0.015 t (tokens + 1),   t a plain round's

    So decoding takes at most 5% longer than plain decoding over 100 tokens, and 3% over 500, however wrong the drafts
    are; what is spared of that is for a round that is dearer than those before it, and for the guard itself. What
    drafting loses in a round is what the round took less t for each of its tokens; a plain round loses nothing. t is
    the median of recent plain rounds: the first two rounds, one after 128 tokens without, those that the bound forces,
    and two where verifying takes longer or shorter than it did, or less than t. A draft is judged by the second dearest
    of the recent ones. Of a machine that changes its speed, t is that of its slower times.

    With a seeded sampler nothing depends on `clock`: rounds cost what `outlook` says, and without one nothing is
    bounded. Everything else is the drafter's own.
    """

    def __init__(
        self, drafter: Drafter, *, outlook: Outlook | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.drafter = drafter
        self.outlook = outlook
        self._clock = clock
        self._prices = _Prices()
        self._accounts: dict[int, _Account] = {}

    @property
    def hidden(self) -> Sequence[int]:
        """The layers whose streams the drafter reads."""
        return self.drafter.hidden

    def begin(self, seq: SequenceState, prefill: Step) -> None:
        """A new account."""
        self._accounts[id(seq)] = _Account()
        self.drafter.begin(seq, prefill)

    def propose(self, seqs: Sequence[SequenceState]) -> list[Draft]:
        """The drafter's, no deeper than the bound allows; none where it allows none."""
        return [self._draft(seq) for seq in seqs]

    def _draft(self, seq: SequenceState) -> Draft:
        account = self._accounts[id(seq)]
        account.begun = self._clock()
        deepest = self._deepest(seq, account)
        if deepest < 1:
            return NO_DRAFT
        room = seq.room
        seq.room = min(room, deepest + 1)
        try:
            (draft,) = self.drafter.propose([seq])
        finally:
            seq.room = room
        account.drafting = self._clock() - account.begun
        return draft

    def _deepest(self, seq: SequenceState, account: _Account) -> int:
        if seq.sampler.seeded:
            return self._by_outlook(account, seq.room)
        if len(self._prices.plain) < KNOWN or account.since_plain >= PROBE:
            return 0
        usual = self._prices.usual
        return self._prices.deepest(account.slack + (1 + SHARE + START) * usual)

    def _by_outlook(self, account: _Account, room: int) -> int:
        if self.outlook is None:
            return room
        left = account.slack + 1 + SHARE + START
        rounds, deepest = self.outlook.rounds, 0
        while deepest + 2 <= MOST_ROWS and (deepest + 1) * self.outlook.draft + rounds[deepest + 2] <= left:
            deepest += 1
        return deepest

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Settle the round's account."""
        account, steps, tokens = self._accounts[id(seq)], outcome.draft.depth, len(outcome.tokens)
        if seq.sampler.seeded:
            if self.outlook is not None:
                took = steps * self.outlook.draft + self.outlook.rounds[1 + len(outcome.draft)]
                account.slack += (1 + SHARE) * tokens - took
        elif account.begun is not None:  # else the loop asked for no draft
            self._settle(account, steps, tokens, self._clock() - account.begun)
        account.begun = None
        self.drafter.observe(seq, outcome)

    def _settle(self, account: _Account, steps: int, tokens: int, took: float) -> None:
        prices = self._prices
        if not steps:
            prices.see_plain(took)
            account.slack += SHARE * prices.usual
            account.since_plain = 0
            return
        rest = took - account.drafting
        account.slack += (1 + SHARE) * tokens * min(prices.usual, rest) - took
        account.since_plain += tokens
        prices.see_drafted(steps, account.drafting, rest)

    def end(self, seq: SequenceState) -> None:
        """Close the account."""
        self._accounts.pop(id(seq), None)
        self.drafter.end(seq)


def _dear(seconds: deque[float]) -> float:
    """The second dearest, or the only one: one that was disturbed is not to stop all others."""
    return sorted(seconds)[-min(2, len(seconds))]
