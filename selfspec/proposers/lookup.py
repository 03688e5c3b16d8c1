"""Prompt lookup: propose the tokens that followed an earlier occurrence of the text's longest repeated suffix.

Saxena 2023 (prompt lookup decoding); with a suffix automaton as in SAM-Decoding (Hu et al. 2411.10666).
"""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.proposers.base import NO_PROPOSAL, AcceptanceStats, Proposal
from selfspec.proposers.suffix_automaton import SuffixAutomaton

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
