"""Prompt lookup: a text goes on as it did where its longest repeated suffix stood before.

Saxena 2023 (prompt lookup decoding); by a suffix automaton as SAM-Decoding (Hu et al. 2411.10666).
"""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.proposers.base import NO_GUESS, Chances, Guess
from selfspec.proposers.suffix_automaton import SuffixAutomaton

# By the length of the repeated suffix, from 0, until the text itself tells: of SmolLM2's answers to chat prompts.
FIRST = (0.0, 0.18, 0.48, 0.51, 0.64, 0.71, 0.8, 0.8, 0.8, 0.93)


class LookupReader:
    """One text's suffixes, and how often what followed them once followed them again."""

    def __init__(self) -> None:
        self._text = SuffixAutomaton()
        self._chances = Chances(FIRST)

    def append(self, token: int) -> None:
        """See whether it was right, then learn the token."""
        match = self._text.suffix()
        if match.length:
            self._chances.see(match.length, self._text.after(match, (), 1) == [token])
        self._text.append(token)

    def guess(self, drafted: Sequence[int], most: int) -> Guess:
        """What followed the longest repeated suffix where it stood last."""
        match = self._text.suffix()
        for token in drafted:
            match = self._text.then(match, token)
        if not match.length or most < 1:
            return NO_GUESS
        tokens = self._text.after(match, drafted, most)
        return Guess(tokens, [self._chances(match.length + i) for i in range(len(tokens))])


class Lookup:
    """Prompt lookup; every text by itself."""

    name = "lookup"

    def reader(self) -> LookupReader:
        """One for a text that has no token yet."""
        return LookupReader()
