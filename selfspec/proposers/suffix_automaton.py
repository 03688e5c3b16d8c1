"""A suffix automaton that grows with its text: where the longest repeated suffix stood before, in constant time.

Blumer et al. 1985; matches as in SAM-Decoding (Hu et al. 2411.10666). Pure Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """What stands in the text and ends in some token: its state, and its length in tokens (0: nothing does)."""

    state: int
    length: int


NO_MATCH = Match(0, 0)


class SuffixAutomaton:
    """All substrings of a text, each state those that end at the same places. Appending takes constant time, amortised.

    A text of n tokens has at most 2n states; `tokens` is the text.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # the state of the longest suffix that ends at other places, too
        self._length = [0]  # of a state's longest substring
        self._first = [0]  # where its substrings first end: the number of tokens up to there
        self._latest = [0]  # where they were last found to end, before the text's last token
        self._last = 0  # the state of the whole text
        for token in tokens:
            self.append(token)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def states(self) -> int:
        """How many there are."""
        return len(self._link)

    def append(self, token: int) -> None:
        """Add a token to the text."""
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
            found = following[state][token]
            link[mine] = found if length[found] == length[state] + 1 else self._split(state, token, found)
        self._last = mine

    def _new(self, following: dict[int, int], length: int, link: int, first: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._first.append(first)
        self._latest.append(first)
        return len(self._link) - 1

    def _split(self, state: int, token: int, found: int) -> int:
        """A state of its own for the shorter ones of `found`'s substrings, which end at more places from now on."""
        copy = self._new(dict(self._next[found]), self._length[state] + 1, self._link[found], self._first[found])
        self._latest[copy] = self._latest[found]
        self._link[found] = copy
        while state >= 0 and self._next[state].get(token) == found:
            self._next[state][token] = copy
            state = self._link[state]
        return copy

    def suffix(self) -> Match:
        """The text's longest suffix that stands elsewhere in it."""
        state = max(self._link[self._last], 0)
        return Match(state, self._length[state])

    def then(self, match: Match, token: int) -> Match:
        """The longest suffix of a match and a token after it that stands in the text."""
        state, length = match
        while token not in self._next[state]:
            state = self._link[state]
            if state < 0:
                return NO_MATCH
            length = self._length[state]
        return Match(self._next[state][token], length + 1)

    def after(self, match: Match, drafted: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that once followed a match, which ends the text and the tokens `drafted` after it.

        The latest place that is known counts. What follows up to the end repeats what is drafted, and then itself.
        """
        state, n = match.state, len(self.tokens)
        while state and self._first[state] >= n:
            state = self._link[state]
        if not state:
            return []
        end = self._latest[state] if self._latest[state] < n else self._first[state]
        found = self.tokens[end : end + most]
        for at in range(end + len(found) - n, most - len(found) + end + len(found) - n):
            found.append(drafted[at] if at < len(drafted) else found[at - len(drafted)])
        return found

    def others(self, match: Match) -> list[int]:
        """All tokens that once followed a match, those that did so latest first."""
        following = self._next[match.state]
        return sorted(following, key=lambda token: -self._latest[following[token]])
