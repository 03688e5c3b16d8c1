"""Scheduling of drafts in a batch of sequences: expected accepted tokens are weighed against the cost of wider passes.

Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from selfspec.types.costs import PassCosts

HORIZON = 8  # most further tokens of a sequence that are considered: an expensive row may precede cheap rows
FIRST, KNOWN = 0.7, 8.0  # prior acceptance rate of a draft's first token, and its weight in drafts
MEMORY = 0.98  # decay of the observations in each round
MARGIN = 1.1  # drafting must bring this multiple of its cost, so that marginal gains are not pursued
PRICED, OFF = 4.0, 2.0  # prior weight of the costs, in full passes; largest deviation of a round, in expected costs
LOOKUP_PRIOR = 16.0  # prior weight of the proposers' chances of lookup tokens, in tokens
# of a sequence's own history: weight of the batch's acceptance rate, in drafts; decay of a draft with each later one
PRIOR_DRAFTS, FADING = 4.0, 0.9
STEPS_KNOWN = 64.0  # prior weight of plain decoding's speed (one token a sequence and plain round), in plain rounds


class _ObservedRatio:
    """The recent ratio of observed to expected amounts, taken over sums because single rounds are noisy.

    `known`: the weight, in units of the expected amount, of the prior ratio 1.
    """

    def __init__(self, known: float) -> None:
        self._known = known
        self._expected = self._observed = 0.0

    @property
    def now(self) -> float:
        return (self._known + self._observed) / (self._known + self._expected)

    def record(self, expected: float, observed: float) -> None:
        """Add a round; its deviation from the expected amount is clipped to `OFF` times that amount."""
        self._expected = MEMORY * self._expected + expected
        self._observed = MEMORY * self._observed + min(max(observed, (1 - OFF) * expected), (1 + OFF) * expected)


class BatchDraftScheduler:
    """Scheduler that allocates drafted tokens to the sequences of a batch, by Dinkelbach's method as `RateOptimal`.

    Work that takes t seconds is worth it if its expected tokens exceed `rate` * t, where `rate` is the tokens per
    second of decoding this number of sequences: without drafts, or with drafts if those were faster. Before each draft
    pass, `allocate_tokens` weighs the further tokens of all sequences by their chances to be accepted, the passes that
    draft them and the longer verification pass; sequences that get no token are verified with the tokens they have.

    The decision to draft a token is made before that token is drawn, from tokens drawn earlier, so sampling stays
    exact. `prices`: the costs of passes, measured on short texts; the durations of rounds (`record_duration`) therefore
    correct the costs of plain rounds, of draft passes and of verifying more tokens. Verified lookup tokens correct the
    chances of lookup tokens likewise. `first`: the initial chance that a draft's first token is accepted.
    """

    def __init__(self, prices: PassCosts, *, first: float = FIRST) -> None:
        self.prices = prices
        self._known = first
        self._speeds: dict[int, tuple[float, float]] = {}  # by batch size: plain rounds' time, tokens a sequence
        self._tried = self._right = 0.0  # number of drafts, and of drafts whose first token was accepted
        self._rows, self._all, self._emitted, self._nodes, self._drafting = 0, 0, 0, 0, 0.0
        self.later = first  # latest chance that a token is accepted if the token before it is
        known = PRICED * prices.verified(1)
        # Ratio of observed to expected time: of plain rounds, of draft passes, and of verifying drafted tokens.
        self._plain, self._passes, self._verifying = _ObservedRatio(known), _ObservedRatio(known), _ObservedRatio(known)
        self._plain_of: dict[int, _ObservedRatio] = {}  # `_plain` by number of sequences
        # By number of sequences: seconds of verification beyond the corrected cost, and the tokens verified. If a plain
        # pass was measured too slow, a wider pass seems to cost nothing more, and no factor corrects a cost of 0.
        self._beyond: dict[int, tuple[float, float]] = {}
        self._lookup_ratio = _ObservedRatio(
            LOOKUP_PRIOR
        )  # accepted lookup tokens over the number expected from their chances
        self._spent = 0.0  # measured seconds of this round's draft passes
        self._hoped = self._got = 0.0  # lookup tokens of this round: expected and actual number accepted

    @property
    def rows(self) -> int:
        """The number of sequences that this round decodes."""
        return self._rows

    @property
    def first(self) -> float:
        """The chance that a draft's first token is accepted."""
        return (self._known * KNOWN + self._right) / (KNOWN + self._tried)

    @property
    def rate(self) -> float:
        """Tokens per second at the current number of sequences, including sequences in prefill.

        A token that is not drafted now is soon decoded beside the sequences now in prefill, where it costs less.
        """
        time, tokens = self._speeds.get(self._all, (1.0, 1.0))
        return max(tokens / time, 1.0) * self._all / self._usual(self._all)

    def begin(self, rows: int, reading: int = 0) -> None:
        """Begin a round of `rows` sequences, with `reading` in prefill; account for the round before."""
        if self._emitted:
            usual = self._usual(self._rows)
            more = self._passes.now * self._drafting + self._wider(self._rows, self._nodes)
            time, tokens = self._speeds.get(self._rows, (STEPS_KNOWN, STEPS_KNOWN))
            time = MEMORY * time + 1 + more / usual
            self._speeds[self._rows] = time, MEMORY * tokens + self._emitted / self._rows
        self._tried, self._right = MEMORY * self._tried, MEMORY * self._right
        self._lookup_ratio.record(self._hoped, self._got)
        self._rows, self._emitted, self._nodes, self._drafting, self._spent = rows, 0, 0, 0.0, 0.0
        self._hoped = self._got = 0.0
        self._all = rows + reading

    def draft_lengths(self, chances: Sequence[Sequence[float]], *, verified: int) -> list[int]:
        """Return how many further tokens each sequence is expected to draft; those with any draft another token now.

        `chances[i]`: the chances that the 1st, 2nd, .. further token of sequence i is accepted, all tokens before it
        included. `verified`: the number of tokens that will be verified in any case.
        """
        later = [row[1] / row[0] for row in chances if len(row) > 1 and row[0]]
        self.later = sum(later) / len(later) if later else self.later
        return allocate_tokens(chances, MARGIN * self.rate, self._drafted, lambda more: self._wider(verified, more))

    def common_length(self, chances: Sequence[float], later: float, lengths: Sequence[int]) -> int:
        """Return which of `lengths` all sequences draft, the one that is worth most; 0 if none is worth its cost.

        For a round that is launched whole, so that one decision holds for all of its draft passes. `chances[i]`: the
        chance that the first token of sequence i is accepted; `later`: the chance that a token is accepted if the token
        before it is.
        """
        self.later = later
        rows, hope, rate = len(chances), sum(chances), MARGIN * self.rate
        return max((0, *lengths), key=lambda length: self._worth(length, rows, hope, rate, verified=rows))

    def _worth(self, length: int, drafting: int, hope: float, rate: float, *, verified: int, others: int = 0) -> float:
        """Return the expected tokens of drafts of `length` tokens each, less `rate` times the seconds that they take.

        `drafting`: the number of sequences that draft; `hope`: the sum of the chances that their first tokens are
        accepted. `verified`: the tokens that are verified in any case; `others`: further ones that are not drafted.
        """
        takes = length * self._drafted(drafting) + self._wider(verified, others + length * drafting)
        return hope * _accepted(self.later, length) - rate * takes

    def lookup_lengths(self, chances: Sequence[Sequence[float]], *, instead: bool = False) -> list[int]:
        """Return how many lookup tokens of each sequence to verify; verification is their only cost.

        `chances[i]`: for each lookup token of sequence i, the chance that it is right if all before it are. `instead`:
        lookup tokens replace a sequence's draft, so a sequence gets them only where the round is then worth more.
        """
        verified, trust = max(len(chances), self._rows), self._lookup_ratio.now
        reached = [
            (trust * reach, i) for i, row_chances in enumerate(chances) for reach in accumulate(row_chances, mul)
        ]
        reached.sort(key=lambda item: -item[0])
        rate = MARGIN * self.rate
        best, taken, brings = 0.0, 0, 0.0
        for n, (reach, _) in enumerate(reached, start=1):
            brings += reach
            worth = brings - rate * self._wider(verified, n)
            if worth > best:
                best, taken = worth, n
        counts, tokens = [0] * len(chances), [0.0] * len(chances)
        for reach, i in reached[:taken]:
            counts[i] += 1
            tokens[i] += reach
        if instead:
            kept = self._in_place_of_drafts(counts, tokens)
            counts = [count if i in kept else 0 for i, count in enumerate(counts)]
        self._hoped += sum(expected for count, expected in zip(counts, tokens, strict=True) if count) / trust
        return counts

    def _in_place_of_drafts(self, counts: Sequence[int], tokens: Sequence[float]) -> set[int]:
        """Return the sequences for which `counts` lookup tokens, all others drafting, make the round worth most.

        `tokens`: the expected number of each sequence's lookup tokens that are right. Sequences draft in lockstep, so
        one that does not draft shortens a draft pass by less than its share of it: sequences are added by expected
        tokens, and each number of them is weighed with the best common draft length of the others.
        """
        asked, rows, rate = len(counts), max(len(counts), self._rows), MARGIN * self.rate
        order = sorted((i for i in range(asked) if counts[i]), key=lambda i: -tokens[i])
        best, most, nodes, brings = -math.inf, 0, 0, 0.0
        for number in range(len(order) + 1):
            drafting = asked - number
            if number:
                nodes, brings = nodes + counts[order[number - 1]], brings + tokens[order[number - 1]]
            hope, lengths = drafting * self.first, range(HORIZON + 1 if drafting else 1)
            worth = brings + max(
                self._worth(length, drafting, hope, rate, verified=rows, others=nodes) for length in lengths
            )
            if worth > best:
                best, most = worth, number
        return set(order[:most])

    def record_duration(self, seconds: float) -> None:
        """Record the round's duration in seconds, after `record_draft` for each of its sequences."""
        rows = self._rows
        if not (self._nodes or self._drafting):
            for times in self._plain, self._plain_of.setdefault(rows, _ObservedRatio(0.0)):
                times.record(self.prices.verified(rows), seconds)
            if rows in self._beyond:  # decays, so that one disturbed round does not rule drafting out for good
                beyond, tokens = self._beyond[rows]
                self._beyond[rows] = MEMORY * beyond, tokens
        elif rows > 1:  # a single sequence's own controller decides, and reports no draft passes
            self._passes.record(self._drafting, self._spent)
            expected, usual = self.prices.wider(rows, self._nodes), self._usual(rows)
            observed = seconds - self._spent - usual
            self._verifying.record(expected, observed)
            left = min(max(observed - self._verifying.now * expected, -OFF * usual), OFF * usual)
            beyond, tokens = self._beyond.get(rows, (0.0, rows))
            self._beyond[rows] = MEMORY * beyond + left, MEMORY * tokens + self._nodes

    def _usual(self, rows: int) -> float:
        """Return the expected seconds of a plain round of `rows` sequences."""
        return self._plain_of.get(rows, self._plain).now * self.prices.verified(rows)

    def _drafted(self, tokens: int) -> float:
        """Return the expected seconds of a draft-path pass over `tokens` tokens."""
        return self._passes.now * self.prices.drafted(tokens)

    def _wider(self, verified: int, more: int) -> float:
        """Return the expected seconds that verifying `more` further tokens adds to a pass."""
        beyond, tokens = self._beyond.get(self._rows, (0.0, 1.0))
        return max(self._verifying.now * self.prices.wider(verified, more) + more * beyond / tokens, 0.0)

    def record_pass(self, tokens: int, seconds: float = 0.0) -> None:
        """Record a draft-path pass over `tokens` tokens; `seconds` includes all the work around it."""
        self._drafting += self.prices.drafted(tokens)
        self._spent += seconds

    def record_common(self, passes: int, rows: int) -> None:
        """Record a round that was launched whole: its number of draft passes, each over `rows` tokens.

        It is timed as a whole; they are taken to have had their expected share, so that any other time corrects the
        cost of verification.
        """
        for _ in range(passes):
            self.record_pass(rows, self._drafted(rows))

    def record_draft(self, drafted: int, accepted: int, emitted: int, *, nodes: int) -> None:
        """Record the result of a sequence's draft in this round.

        `drafted`: tokens drafted one after the other, 0 for lookup tokens; `accepted`: drafted or lookup tokens that
        were accepted. `nodes`: drafted or lookup tokens that were verified, all candidates counted. `emitted`: all
        tokens that the sequence emitted.
        """
        self._emitted += emitted
        self._nodes += nodes
        if drafted:
            self._tried += 1
            self._right += accepted > 0
        else:
            self._got += accepted


def most_paying_sequences(prices: PassCosts, acceptance_rate: float, *, most: int) -> int:
    """Return the number of sequences, at most `most`, up to which a scheduler is expected to let a batch draft.

    `acceptance_rate`: the chance of each drafted token, if those before it are accepted. 0: not even one sequence.
    """
    for rows in range(1, most + 1):
        scheduler = BatchDraftScheduler(prices, first=acceptance_rate)
        scheduler.begin(rows)
        chances = [[acceptance_rate**n for n in range(1, HORIZON + 1)]] * rows
        if not any(scheduler.draft_lengths(chances, verified=rows)):
            return rows - 1
    return most


def _accepted(later: float, tokens: int) -> float:
    """Return how many of `tokens` tokens are accepted if the first is, each after it with the chance `later`."""
    return tokens if later >= 1 else (1 - later**tokens) / (1 - later)


class AcceptanceHistory:
    """How often the first token of one sequence's drafts was accepted lately; the batch's rate counts as a prior."""

    def __init__(self) -> None:
        self._drafts = self._accepted = 0.0

    def record(self, accepted: bool) -> None:
        """Count a verified draft, and whether its first token was accepted."""
        self._drafts, self._accepted = FADING * self._drafts + 1, FADING * self._accepted + accepted

    def chance(self, shared: float) -> float:
        """Return the chance that the next draft's first token is accepted; `shared`: that chance in the whole batch."""
        return (PRIOR_DRAFTS * shared + self._accepted) / (PRIOR_DRAFTS + self._drafts)


def allocate_tokens(
    chances: Sequence[Sequence[float]],
    rate: float,
    draft_seconds: Callable[[int], float],
    verify_seconds: Callable[[int], float],
) -> list[int]:
    """Return how many further tokens each sequence drafts: those whose expected tokens exceed `rate` * time by most.

    `chances[i][d]`: the chance that the (d + 1)-th further token of sequence i is accepted, all tokens before it
    included, so it never rises with d. `draft_seconds(n)`: the seconds of a draft pass over n tokens; sequences draft
    in lockstep, so the d-th pass drafts the d-th further tokens. `verify_seconds(n)`: the seconds that n more tokens
    add to the verification pass.

    For each number of draft passes, tokens are added in order of chance, and the best of all these allocations is
    returned. As chances never rise with d, a token is never added before the token that it follows. The allocation is
    optimal if a draft pass takes a fixed time and a time per token, whatever the verification takes.
    """
    passes = max(map(len, chances), default=0)
    order = sorted((-chance, d, i) for i, row in enumerate(chances) for d, chance in enumerate(row))
    drafting = [draft_seconds(n) for n in range(1 + len(chances))]
    verifying = [verify_seconds(n) for n in range(1 + len(order))]
    best, depth, number = 0.0, 0, 0
    for limit in range(1, passes + 1):
        in_pass, tokens, seconds, taken = [0] * limit, 0.0, 0.0, 0
        for minus, d, _ in order:
            if d >= limit:
                continue
            taken, tokens = taken + 1, tokens - minus
            seconds += drafting[in_pass[d] + 1] - (drafting[in_pass[d]] if in_pass[d] else 0.0)
            in_pass[d] += 1
            worth = tokens - rate * (seconds + verifying[taken])
            if worth > best:
                best, depth, number = worth, limit, taken
    counts = [0] * len(chances)
    for _, _, i in [token for token in order if token[1] < depth][:number]:
        counts[i] += 1
    return counts
