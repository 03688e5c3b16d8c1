"""How much several sequences draft together: what each may hope for, against what passes over so many tokens take.

Pure Python: knows nothing of models and tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from selfspec.facts.load import LoadPrices

FURTHER = (1, 2, 4, 8)  # tokens that are looked ahead, as dear rows may be followed by cheap ones
FIRST, KNOWN = (
    0.7,
    8.0,
)  # the chance of a draft's first token where nothing was drafted lately, and what that counts for
MEMORY = 0.98  # what was seen in a round counts for as much of it in the next one
MARGIN = 1.15  # times what it takes is what drafting must bring: where it hardly matters, nothing is drafted
RECENT, LEARN, LEAST, MOST = 5, 0.2, 0.5, 3.0  # plain rounds of a number of sequences that count; how fast is learnt
STEPS_KNOWN = 64.0  # plain rounds that a speed of 1 counts for at the start


class Load:
    """Decides for all sequences of a round together which of them draft another token, by Dinkelbach's way (`rate`).

    Whatever takes t seconds is worth it where it is expected to bring more than `rate` * t tokens, `rate` being the
    tokens a second that decoding brings with as many sequences: plainly, or with drafts where those have brought more.
    A draft of k sequences that goes on for j tokens takes j draft passes over k tokens and k * j more tokens to verify;
    it brings each sequence's chance that its next token is accepted, times 1 + l + .. + l^(j-1), l the chance that a
    token is right where the one before it is. Those with most hope draft, as many as bring most.

    A token is drafted, or not, before it is drawn, by what all sequences drew before: so sampling stays exact. What
    rounds with drafts `took` more than plain ones corrects what they are priced at.
    """

    def __init__(self, prices: LoadPrices) -> None:
        self.prices = prices
        self._speeds: dict[int, tuple[float, float]] = {}  # by the same: plain rounds' time, and tokens of a sequence
        self._tried = self._right = 0.0  # drafts, and those whose first token was accepted
        self._rows, self._emitted, self._nodes, self._drafting = 0, 0, 0, 0.0
        self._plain: dict[int, deque[float]] = {}  # seconds of plain rounds, by how many sequences took them
        self.later = FIRST  # the chance that a token is right where the one before it is, as drafts told last
        self._dear = 1.0  # what drafts take, times what they are priced at

    @property
    def first(self) -> float:
        """The chance that a draft's first token is accepted."""
        return (FIRST * KNOWN + self._right) / (KNOWN + self._tried)

    @property
    def rate(self) -> float:
        """Tokens a second with as many sequences as there are now."""
        time, tokens = self._speeds.get(self._rows, (1.0, 1.0))
        return max(tokens / time, 1.0) * self._rows / self.prices.verified(self._rows)

    @property
    def _asked(self) -> float:
        """Tokens that drafts must bring for a second that they are priced at."""
        return MARGIN * self._dear * self.rate

    def begin(self, rows: int) -> None:
        """A round of so many sequences begins; what the one before it brought is known."""
        if self._emitted:
            prices = self.prices
            took = self._drafting + prices.verified(self._rows + self._nodes)
            time, tokens = self._speeds.get(self._rows, (STEPS_KNOWN, STEPS_KNOWN))
            time = MEMORY * time + took / prices.verified(self._rows)
            self._speeds[self._rows] = time, MEMORY * tokens + self._emitted / self._rows
        self._tried, self._right = MEMORY * self._tried, MEMORY * self._right
        self._rows, self._emitted, self._nodes, self._drafting = rows, 0, 0, 0.0

    def going(self, hopes: Sequence[float], later: float, *, verified: int, most: int) -> list[int]:
        """Which sequences draft another token, by number, those with most hope first.

        `hopes[i]`: the chance that the next token of the i-th would be accepted; `later`: that a token is where the one
        before it is. `verified`: tokens that are to be verified already; `most`: that any may still draft.
        """
        self.later = later
        order = sorted(range(len(hopes)), key=lambda i: -hopes[i])
        sums = list(accumulate(hopes[i] for i in order))
        prices, rate, base = self.prices, self._asked, self.prices.verified(verified)
        best, taken = 0.0, 0
        for j in (j for j in FURTHER if j <= most):
            brings = j if later >= 1 else (1 - later**j) / (1 - later)
            for k, hope in enumerate(sums, start=1):
                takes = j * prices.drafted(k) + prices.verified(verified + k * j) - base
                worth = hope * brings - rate * takes
                if worth > best:
                    best, taken = worth, k
        return order[:taken]

    def free(self, chances: Sequence[Sequence[float]], *, instead: bool = False) -> list[int]:
        """How many tokens of each sequence's guess are verified, where guesses take nothing but that.

        `chances[i]`: of each token of the i-th guess, that it is right where those before it are. `instead`: of drafts,
        so that a guess must bring as much for the round's time as rounds have brought lately.
        """
        verified = len(chances)
        reached = [(reach, i) for i, of in enumerate(chances) for reach in accumulate(of, mul)]
        reached.sort(key=lambda one: -one[0])
        rate, base = self._asked, self.prices.verified(verified)
        best, taken, brings = 0.0, 0, 0.0
        for n, (reach, _) in enumerate(reached, start=1):
            brings += reach
            worth = brings - rate * (self.prices.verified(verified + n) - base)
            if worth > best:
                best, taken = worth, n
        counts, tokens = [0] * len(chances), [1.0] * len(chances)
        for reach, i in reached[:taken]:
            counts[i] += 1
            tokens[i] += reach
        least = self._promised() * self.prices.verified(verified + taken) / max(verified, 1) if instead else 0.0
        return [count if of > least else 0 for count, of in zip(counts, tokens, strict=True)]

    def took(self, seconds: float) -> None:
        """The round, of which all was seen, took so long."""
        plain = self._plain.setdefault(self._rows, deque(maxlen=RECENT))
        if not (self._nodes or self._drafting):
            plain.append(seconds)
            return
        prices, usual = self.prices, self.prices.verified(self._rows)
        expected = self._drafting + prices.verified(self._rows + self._nodes) - usual
        if expected > 0 and self._rows > 1:  # alone, a sequence's own controller decides and tells no passes
            more = seconds - (sorted(plain)[len(plain) // 2] if plain else usual)
            self._dear += LEARN * (min(max(more / expected, LEAST), MOST) - self._dear)

    def _promised(self) -> float:
        """Tokens a second that drafts promise where all go on for the best number of tokens, or that rounds bring."""
        rows, prices, later = self._rows, self.prices, self.later
        found, brings = self.rate, 1.0
        for n in range(1, FURTHER[-1] + 1):
            brings += self.first * later ** (n - 1)
            takes = self._dear * (n * prices.drafted(rows) + prices.verified((1 + n) * rows) - prices.verified(rows))
            found = max(found, rows * brings / (prices.verified(rows) + takes))
        return found

    def passed(self, tokens: int) -> None:
        """A pass along the draft path was made over so many tokens."""
        self._drafting += self.prices.drafted(tokens)

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
