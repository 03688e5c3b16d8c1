"""How much several sequences draft together: what each may hope for, against what passes over so many tokens take.

Pure Python: knows nothing of models and tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from selfspec.types.round_costs import LoadPrices

FURTHER = (1, 2, 4, 8)  # tokens that are looked ahead, as dear rows may be followed by cheap ones
FIRST, KNOWN = 0.7, 8.0  # the chance of a draft's first token where nothing else is known, and what that counts for
MEMORY = 0.98  # what was seen in a round counts for as much of it in the next one
MARGIN = 1.2  # times what it takes is what drafting must bring: where it hardly matters, nothing is drafted
PRICED, OFF = 4.0, 2.0  # full passes that prices count for at the start; times a price that a round may be off it
GUESSES = 16.0  # guessed tokens that count as right as often as their chances told, at the start
STEPS_KNOWN = 64.0  # plain rounds that a speed of 1 counts for at the start


class _Times:
    """What was found lately, times what was expected: by the sums of both, as a little of either is mostly chance.

    `known`: how much of it counts as found as it was expected, at the start.
    """

    def __init__(self, known: float) -> None:
        self._known = known
        self._expected = self._found = 0.0

    @property
    def now(self) -> float:
        return (self._known + self._found) / (self._known + self._expected)

    def see(self, expected: float, found: float) -> None:
        """Another round, which may be off what was expected by so much and no more."""
        self._expected = MEMORY * self._expected + expected
        self._found = MEMORY * self._found + min(max(found, (1 - OFF) * expected), (1 + OFF) * expected)


class BatchDraftScheduler:
    """Decides for all sequences of a round together which of them draft another token, by Dinkelbach's way (`rate`).

    Whatever takes t seconds is worth it where it is expected to bring more than `rate` * t tokens, `rate` being the
    tokens a second that decoding brings with as many sequences: plainly, or with drafts where those have brought more.
    A draft of k sequences that goes on for j tokens takes j draft passes over k tokens and k * j more tokens to verify;
    it brings each sequence's chance that its next token is accepted, times 1 + l + .. + l^(j-1), l the chance that a
    token is right where the one before it is. Those with most hope draft, as many as bring most.

    A token is drafted, or not, before it is drawn, by what all sequences drew before: so sampling stays exact. What
    plain rounds take, draft passes, and verifying more than a plain round, is corrected by what rounds `took`: prices
    are of short texts. So is what guesses bring, by what they brought. `first`: the chance that a draft's first token
    is accepted, as long as little was drafted.
    """

    def __init__(self, prices: LoadPrices, *, first: float = FIRST) -> None:
        self.prices = prices
        self._known = first
        self._speeds: dict[int, tuple[float, float]] = {}  # by sequences: plain rounds' time, and tokens of each
        self._tried = self._right = 0.0  # drafts, and those whose first token was accepted
        self._rows, self._all, self._emitted, self._nodes, self._drafting = 0, 0, 0, 0, 0.0
        self.later = first  # the chance that a token is right where the one before it is, as drafts told last
        known = PRICED * prices.verified(1)
        # What plain rounds, draft passes and verifying more than a plain round take, times what they are priced at.
        self._plain, self._passes, self._verifying = _Times(known), _Times(known), _Times(known)
        self._plain_of: dict[int, _Times] = {}  # the first of these by the number of sequences
        # Likewise, seconds that verifying took beyond that, and for how many tokens: where a plain pass was timed too
        # dear, a wider one is priced at nothing more, which no factor corrects.
        self._beyond: dict[int, tuple[float, float]] = {}
        self._guesses = _Times(GUESSES)  # guessed tokens that are accepted, times as many as their chances told
        self._spent = 0.0  # seconds of this round's draft passes, by the clock
        self._hoped = self._got = 0.0  # guessed tokens of this round that were expected to be accepted, and that were

    @property
    def first(self) -> float:
        """The chance that a draft's first token is accepted."""
        return (self._known * KNOWN + self._right) / (KNOWN + self._tried)

    @property
    def rate(self) -> float:
        """Tokens a second with as many sequences as there are, those that are still read counted in.

        What is not drafted now is decoded beside those soon, where it costs less.
        """
        time, tokens = self._speeds.get(self._all, (1.0, 1.0))
        return max(tokens / time, 1.0) * self._all / self._usual(self._all)

    def begin(self, rows: int, reading: int = 0) -> None:
        """A round of so many sequences begins, beside others that are read; what the one before it brought is known."""
        if self._emitted:
            usual = self._usual(self._rows)
            more = self._passes.now * self._drafting + self._wider(self._rows, self._nodes)
            time, tokens = self._speeds.get(self._rows, (STEPS_KNOWN, STEPS_KNOWN))
            time = MEMORY * time + 1 + more / usual
            self._speeds[self._rows] = time, MEMORY * tokens + self._emitted / self._rows
        self._tried, self._right = MEMORY * self._tried, MEMORY * self._right
        self._guesses.see(self._hoped, self._got)
        self._rows, self._emitted, self._nodes, self._drafting, self._spent = rows, 0, 0, 0.0, 0.0
        self._hoped = self._got = 0.0
        self._all = rows + reading

    def going(self, hopes: Sequence[float], later: float, *, verified: int, most: int) -> list[int]:
        """Which sequences draft another token, by number, those with most hope first.

        `hopes[i]`: the chance that the next token of the i-th would be accepted; `later`: that a token is where the one
        before it is. `verified`: tokens that are to be verified already; `most`: that any may still draft.
        """
        self.later = later
        order = sorted(range(len(hopes)), key=lambda i: -hopes[i])
        sums = list(accumulate(hopes[i] for i in order))
        rate = MARGIN * self.rate
        best, taken = 0.0, 0
        for j in (j for j in FURTHER if j <= most):
            brings = j if later >= 1 else (1 - later**j) / (1 - later)
            for k, hope in enumerate(sums, start=1):
                takes = j * self._drafted(k) + self._wider(verified, k * j)
                worth = hope * brings - rate * takes
                if worth > best:
                    best, taken = worth, k
        return order[:taken]

    def free(self, chances: Sequence[Sequence[float]], *, instead: bool = False) -> list[int]:
        """How many tokens of each sequence's guess are verified, where guesses take nothing but that.

        `chances[i]`: of each token of the i-th guess, that it is right where those before it are. `instead`: of drafts,
        so that a guess must bring as much for the round's time as rounds have brought lately.
        """
        verified, trust = len(chances), self._guesses.now
        reached = [(trust * reach, i) for i, of in enumerate(chances) for reach in accumulate(of, mul)]
        reached.sort(key=lambda one: -one[0])
        rate = MARGIN * self.rate
        best, taken, brings = 0.0, 0, 0.0
        for n, (reach, _) in enumerate(reached, start=1):
            brings += reach
            worth = brings - rate * self._wider(verified, n)
            if worth > best:
                best, taken = worth, n
        counts, tokens = [0] * len(chances), [1.0] * len(chances)
        for reach, i in reached[:taken]:
            counts[i] += 1
            tokens[i] += reach
        takes = self._usual(verified) + self._wider(verified, taken)
        least = self._promised() * takes / max(verified, 1) if instead else 0.0
        found = [count if of > least else 0 for count, of in zip(counts, tokens, strict=True)]
        self._hoped += sum(of - 1 for count, of in zip(found, tokens, strict=True) if count) / trust
        return found

    def took(self, seconds: float) -> None:
        """The round, of which all was seen, took so long."""
        rows = self._rows
        if not (self._nodes or self._drafting):
            for times in self._plain, self._plain_of.setdefault(rows, _Times(0.0)):
                times.see(self.prices.verified(rows), seconds)
            if rows in self._beyond:  # so that what a disturbed round told is tried again
                beyond, tokens = self._beyond[rows]
                self._beyond[rows] = MEMORY * beyond, tokens
        elif rows > 1:  # alone, a sequence's own controller decides and tells no passes
            self._passes.see(self._drafting, self._spent)
            expected, usual = self.prices.wider(rows, self._nodes), self._usual(rows)
            found = seconds - self._spent - usual
            self._verifying.see(expected, found)
            left = min(max(found - self._verifying.now * expected, -OFF * usual), OFF * usual)
            beyond, tokens = self._beyond.get(rows, (0.0, rows))
            self._beyond[rows] = MEMORY * beyond + left, MEMORY * tokens + self._nodes

    def _usual(self, rows: int) -> float:
        """Seconds of a plain round of so many sequences."""
        return self._plain_of.get(rows, self._plain).now * self.prices.verified(rows)

    def _drafted(self, tokens: int) -> float:
        """Seconds of a pass along the draft path over so many tokens."""
        return self._passes.now * self.prices.drafted(tokens)

    def _wider(self, verified: int, more: int) -> float:
        """Seconds that verifying so many more tokens adds to a pass."""
        beyond, tokens = self._beyond.get(self._rows, (0.0, 1.0))
        return max(self._verifying.now * self.prices.wider(verified, more) + more * beyond / tokens, 0.0)

    def _promised(self) -> float:
        """Tokens a second that drafts promise where all go on for the best number of tokens, or that rounds bring."""
        rows, later = self._rows, self.later
        found, brings = self.rate, 1.0
        for n in range(1, FURTHER[-1] + 1):
            brings += self.first * later ** (n - 1)
            takes = n * self._drafted(rows) + self._wider(rows, n * rows)
            found = max(found, rows * brings / (self._usual(rows) + takes))
        return found

    def passed(self, tokens: int, seconds: float = 0.0) -> None:
        """A pass along the draft path was made over so many tokens; all that it brought took so long."""
        self._drafting += self.prices.drafted(tokens)
        self._spent += seconds

    def see(self, drafted: int, accepted: int, emitted: int, *, nodes: int) -> None:
        """What became of a sequence's draft in this round: of `drafted` tokens, one after the other, some accepted.

        `drafted` is 0 of what was guessed; `nodes`: drafted or guessed tokens that were verified, all candidates
        counted; `emitted`: tokens that came of it in all.
        """
        self._emitted += emitted
        self._nodes += nodes
        if drafted:
            self._tried += 1
            self._right += accepted > 0
        else:
            self._got += accepted
