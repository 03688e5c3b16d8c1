"""Input-guided decoding (Ge et al. 2205.10350): for answers that repeat their input, draft the input's next tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.controllers import Controller, DraftLoop
from selfspec.drafters.controlled import as_draft
from selfspec.drafters.lookup_drafter import LookupDrafter
from selfspec.proposers.base import NO_PROPOSAL, AcceptanceStats, Proposal
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import INPUT

LONGEST = 8  # the most tokens of the answer's end that are matched to find an anchor
# Prior chance of a token by the number of correct tokens in a row since the anchor.
FIRST = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.9, 0.9, 0.95)


@dataclass(slots=True)
class _Copy:
    """State of copying a sequence's input (its prompt) into the answer.

    `size`: the input's number of tokens. `next_position`: the input position of the next token to copy; None while no
    anchor is found.
    """

    size: int
    places: dict[int, list[int]]  # positions of each token in the input
    next_position: int | None = 0
    passed: int = 0  # end of the last copied run in the input
    right: int = 0  # correct tokens in a row since the anchor
    chances: AcceptanceStats = field(default_factory=lambda: AcceptanceStats(FIRST))


class InputDrafter(LookupDrafter):
    """Drafter that copies the prompt, from its first token on, until `controller` ends the draft.

    Where the answer diverges from the prompt, copying goes on after the prompt position, the anchor, at which the
    answer's last tokens occur. The match is lengthened, to 8 tokens at most, until a single occurrence is left. If
    several occurrences are left, the first after the last copied token is taken. Every sequence has its own anchor.
    """

    def __init__(self, controller: Controller) -> None:
        super().__init__((), controller)
        self._copies: dict[SequenceState, _Copy] = {}

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Index the prompt as the sequence's input."""
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
        max_tokens = min(limit.depth, limit.nodes)
        proposal, loop = self._rest(seq, max_tokens), DraftLoop(self.controller_of(seq), depth=max_tokens)
        for chance in proposal.chances:
            if not loop.record(chance):
                break
        return as_draft(proposal.cut(len(loop.confidences)), loop.confidences)

    def _rest(self, seq: SequenceState, most: int) -> Proposal:
        copy = self._copies.get(seq)
        if copy is None or copy.next_position is None:
            return NO_PROPOSAL
        tokens = list[int]()
        for token in seq.tokens[copy.next_position : min(copy.next_position + most, copy.size)]:
            tokens.append(token)
            if token in seq.ends:
                break
        return Proposal(tokens, [copy.chances(copy.right + i) for i in range(len(tokens))], INPUT)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Advance the anchor along the emitted tokens, or search for another anchor."""
        super().observe(seq, outcome)
        if (copy := self._copies.get(seq)) is None:
            return
        for end in range(len(seq.tokens) - len(outcome.tokens) + 1, len(seq.tokens) + 1):
            _follow(copy, seq, end)


def _follow(copy: _Copy, seq: SequenceState, end: int) -> None:
    """Advance or reset the anchor for the answer's token at position `end` - 1."""
    if copy.next_position is not None and copy.next_position < copy.size:
        right = seq.tokens[copy.next_position] == seq.tokens[end - 1]
        copy.chances.record(copy.right, right)
        if right:
            copy.next_position += 1
            copy.right += 1
            copy.passed = copy.next_position
            return
    copy.right = 0
    copy.next_position = _anchor(copy, seq, end)


def _anchor(copy: _Copy, seq: SequenceState, end: int) -> int | None:
    """Return the input position after a match of the answer's last tokens; None if the input has no match."""
    matches = copy.places.get(seq.tokens[end - 1], [])
    for length in range(2, min(LONGEST, end - copy.size) + 1):
        if len(matches) < 2:
            break
        longer_matches = [
            place
            for place in matches
            if place >= length - 1 and seq.tokens[place - length + 1] == seq.tokens[end - length]
        ]
        if not longer_matches:
            break
        matches = longer_matches
    after = [place + 1 for place in matches]
    return next((place for place in after if place > copy.passed), after[-1] if after else None)
