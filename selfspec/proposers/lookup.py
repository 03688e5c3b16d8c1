"""Prompt lookup: propose the tokens that followed an earlier occurrence of the text's longest repeated suffix.

Prompt lookup decoding: Saxena 2023. Matches are found by a suffix automaton (Blumer et al. 1985), as in SAM-Decoding
(Hu et al. 2411.10666). Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from selfspec.proposers.base import NO_PROPOSAL, AcceptanceStats, Proposal


class Match(NamedTuple):
    """A matched substring of the text: its automaton state, and its length in tokens (0: no match)."""

    state: int
    length: int


NO_MATCH = Match(0, 0)


class SuffixAutomaton:
    """All substrings of a text; a state groups substrings with equal end positions. Appending is amortised O(1).

    A text of n tokens has at most 2n states; `tokens` is the text.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # suffix links: the longest suffix in another state
        self._length = [0]  # length of a state's longest substring
        self._first = [0]  # first end position of its substrings: the number of tokens up to there
        self._latest = [0]  # latest known end position of its substrings before the text's last token
        self._last = 0  # state of the whole text
        for token in tokens:
            self.append(token)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def states(self) -> int:
        """The number of states."""
        return len(self._link)

    def append(self, token: int) -> None:
        """Append a token to the text."""
        following, link, length = self._next, self._link, self._length
        if self._last:
            self._latest[link[self._last]] = len(self.tokens)
        self.tokens.append(token)
        mine = self._new({}, len(self.tokens), 0, len(self.tokens))
        state = self._last
        while state >= 0 and token not in following[state]:
            following[state][token] = mine
            state = link[state]
        if state >= 0:
            next_state = following[state][token]
            link[mine] = (
                next_state if length[next_state] == length[state] + 1 else self._split(state, token, next_state)
            )
        self._last = mine

    def _new(self, following: dict[int, int], length: int, link: int, first: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._first.append(first)
        self._latest.append(first)
        return len(self._link) - 1

    def _split(self, state: int, token: int, next_state: int) -> int:
        """Clone `next_state` for its shorter substrings, which end at more positions from now on."""
        copy = self._new(
            dict(self._next[next_state]), self._length[state] + 1, self._link[next_state], self._first[next_state]
        )
        self._latest[copy] = self._latest[next_state]
        self._link[next_state] = copy
        while state >= 0 and self._next[state].get(token) == next_state:
            self._next[state][token] = copy
            state = self._link[state]
        return copy

    def suffix(self) -> Match:
        """Return the text's longest suffix that also occurs elsewhere in it."""
        state = max(self._link[self._last], 0)
        return Match(state, self._length[state])

    def extend(self, match: Match, token: int) -> Match:
        """Return the longest suffix of a match plus the token after it, among the suffixes that occur in the text."""
        state, length = match
        while token not in self._next[state]:
            state = self._link[state]
            if state < 0:
                return NO_MATCH
            length = self._length[state]
        return Match(self._next[state][token], length + 1)

    def continue_match(self, match: Match, drafted: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that followed the latest known earlier occurrence of a match.

        The match is a suffix of the text plus the tokens `drafted`. A continuation that reaches the end of the text
        goes on with `drafted`, then repeats itself.
        """
        state, n = match.state, len(self.tokens)
        while state and self._first[state] >= n:
            state = self._link[state]
        if not state:
            return []
        end = self._latest[state] if self._latest[state] < n else self._first[state]
        continuation = self.tokens[end : end + most]
        for index in range(end + len(continuation) - n, most - len(continuation) + end + len(continuation) - n):
            continuation.append(drafted[index] if index < len(drafted) else continuation[index - len(drafted)])
        return continuation


# Prior chances by the length of the repeated suffix, from 0; measured on SmolLM2's answers to chat prompts.
FIRST = (0.0, 0.18, 0.48, 0.51, 0.64, 0.71, 0.8, 0.8, 0.8, 0.93)


class LookupReader:
    """The suffix automaton of one text, and how often its lookup tokens were right."""

    def __init__(self) -> None:
        self._text = SuffixAutomaton()
        self._chances = AcceptanceStats(FIRST)

    def append(self, token: int) -> None:
        """Record whether the lookup token was right, then append the token."""
        match = self._text.suffix()
        if match.length:
            self._chances.record(match.length, self._text.continue_match(match, (), 1) == [token])
        self._text.append(token)

    def look_up(self, drafted: Sequence[int], most: int) -> Proposal:
        """Return the tokens that followed the latest earlier occurrence of the longest repeated suffix."""
        match = self._text.suffix()
        for token in drafted:
            match = self._text.extend(match, token)
        if not match.length or most < 1:
            return NO_PROPOSAL
        tokens = self._text.continue_match(match, drafted, most)
        return Proposal(tokens, [self._chances(match.length + i) for i in range(len(tokens))])


class Lookup:
    """Prompt lookup: lookup tokens come from the sequence's own text alone."""

    name = "lookup"

    def reader(self) -> LookupReader:
        """Return a reader for an empty text."""
        return LookupReader()
