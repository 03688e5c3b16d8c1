"""Input-guided decoding (Ge et al. 2205.10350): an answer that repeats its input is drafted from the rest of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.controllers import Controller, DraftLoop
from selfspec.drafters.controlled import guessed
from selfspec.drafters.lookup_drafter import FreeDrafter
from selfspec.proposers.base import NO_GUESS, Chances, Guess
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import INPUT

LONGEST = 8  # tokens of the answer's end that an anchor is told by
# The chance of a token, by how many were right in a row since the anchor, until the text itself tells.
FIRST = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.9, 0.9, 0.95)


@dataclass(slots=True)
class _Copy:
    """Where the answer of one text stands in its input: the next token to copy, none after a divergence."""

    size: int
    places: dict[int, list[int]]  # of each token of the input
    at: int | None = 0
    passed: int = 0  # how far the copy had come
    right: int = 0  # tokens in a row since the anchor
    chances: Chances = field(default_factory=lambda: Chances(FIRST))


class InputDrafter(FreeDrafter):
    """Drafts the rest of the prompt, as far as `controller` has it, from its beginning on.

    After a divergence it is anchored again where the answer's last tokens stand in the prompt: as many of them as it
    takes for one place to be left (8 at most; the first after the old anchor of several). Every text has its own.
    """

    def __init__(self, controller: Controller) -> None:
        super().__init__((), controller)
        self._copies: dict[SequenceState, _Copy] = {}

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """The prompt is the input."""
        super().begin(seq, prefill)
        places: dict[int, list[int]] = {}
        for place, token in enumerate(seq.tokens):
            places.setdefault(token, []).append(place)
        self._copies[seq] = _Copy(len(seq.tokens), places)

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence's anchor."""
        super().end(seq)
        self._copies.pop(seq, None)

    def _drafted(self, seq: SequenceState, limit: Limit) -> Draft:
        room = min(limit.depth, limit.nodes)
        guess, play = self._rest(seq, room), DraftLoop(self.controller_of(seq), depth=room)
        for chance in guess.chances:
            if not play.see(chance):
                break
        return guessed(guess.cut(len(play.confidences)), play.confidences)

    def _rest(self, seq: SequenceState, most: int) -> Guess:
        copy = self._copies.get(seq)
        if copy is None or copy.at is None:
            return NO_GUESS
        tokens = list[int]()
        for token in seq.tokens[copy.at : min(copy.at + most, copy.size)]:
            tokens.append(token)
            if token in seq.ends:
                break
        return Guess(tokens, [copy.chances(copy.right + i) for i in range(len(tokens))], INPUT)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Go along with what was emitted, or look for another anchor."""
        super().observe(seq, outcome)
        if (copy := self._copies.get(seq)) is None:
            return
        for end in range(len(seq.tokens) - len(outcome.tokens) + 1, len(seq.tokens) + 1):
            _follow(copy, seq, end)


def _follow(copy: _Copy, seq: SequenceState, end: int) -> None:
    """The answer's next token, the last of the first `end` tokens of the text."""
    if copy.at is not None and copy.at < copy.size:
        right = seq.tokens[copy.at] == seq.tokens[end - 1]
        copy.chances.see(copy.right, right)
        if right:
            copy.at += 1
            copy.right += 1
            copy.passed = copy.at
            return
    copy.right = 0
    copy.at = _anchor(copy, seq, end)


def _anchor(copy: _Copy, seq: SequenceState, end: int) -> int | None:
    """Where the input goes on after the answer's last tokens; none where they do not stand in it."""
    found = copy.places.get(seq.tokens[end - 1], [])
    for length in range(2, min(LONGEST, end - copy.size) + 1):
        if len(found) < 2:
            break
        longer = [
            place
            for place in found
            if place >= length - 1 and seq.tokens[place - length + 1] == seq.tokens[end - length]
        ]
        if not longer:
            break
        found = longer
    after = [place + 1 for place in found]
    return next((place for place in after if place > copy.passed), after[-1] if after else None)
