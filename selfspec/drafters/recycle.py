"""Drafting from known tokens: the highest of the model's last logits (recycling), or the input's next tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.controllers import Controller, DraftLoop
from selfspec.drafters.controlled import LookupDrafter, as_draft, check_candidates
from selfspec.proposers.base import NO_PROPOSAL, AcceptanceStats, Proposal
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import INPUT, RECYCLED

PRIOR_RECYCLED = 0.35  # prior chance that a recycled successor is right, before the text has given evidence


@dataclass(slots=True)
class _Table:
    """The most probable successors of each token, by the last logits after that token.

    `chances`: how often the first successor is right.
    """

    after: dict[int, list[int]] = field(default_factory=dict)
    chances: AcceptanceStats = field(default_factory=lambda: AcceptanceStats((PRIOR_RECYCLED,)))


class RecycleDrafter(LookupDrafter):
    """Drafter of each token's most probable successor, with further successors as candidates at each position.

    `controller` ends the draft and sets the number of candidates. A table of successors is filled from the target's
    logits at committed tokens, in decoding rounds only. Each seeded sequence has a separate table, which depends on its
    text alone; all other sequences share one table. `candidates`: the most tokens proposed at one position, including
    the first successor. Raises `SelfspecError` if `candidates` is below 1, or more than a verification pass holds.
    """

    def __init__(self, controller: Controller, *, candidates: int = 4) -> None:
        check_candidates(candidates)
        super().__init__((), controller)
        self.candidates = candidates
        self._shared, self._tables = _Table(), dict[SequenceState, _Table]()

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Create a separate table of successors for a seeded sequence."""
        super().begin(seq, prefill)
        if seq.sampler.seeded:
            self._tables[seq] = _Table()

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence, and its table if it is seeded."""
        super().end(seq)
        self._tables.pop(seq, None)

    def _drafted(self, seq: SequenceState, limit: Limit) -> Draft:
        table, token = self._table(seq), seq.tokens[-1]
        loop = DraftLoop(self.controller_of(seq), depth=min(limit.depth, limit.nodes))
        tokens, others = list[int](), list[list[int]]()
        while loop.wants and token in table.after:
            token, *rest = table.after[token]
            tokens.append(token)
            others.append(rest)
            loop.record(table.chances(0), token, last=token in seq.ends)
        if not tokens:
            return NO_DRAFT
        counts = loop.candidates(self.candidates, nodes=limit.nodes)
        draft = as_draft(Proposal(tokens, (), RECYCLED), loop.confidences)
        others = [rest[: count - 1] for rest, count in zip(others, counts, strict=True)]
        return draft.with_candidates(others, source=RECYCLED)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Store the most probable successors of the tokens that the round committed."""
        super().observe(seq, outcome)
        assert outcome.step.logits is not None
        table = self._table(seq)
        rows = [0, *(node + 1 for node in outcome.path)][: len(outcome.tokens)]
        logits = outcome.step.logits[0, rows]
        likeliest = logits.topk(min(self.candidates, logits.shape[-1])).indices.tolist()
        read = seq.tokens[-len(rows) - 1 : -1]
        for token, after, came in zip(read, likeliest, outcome.tokens, strict=True):
            if token in table.after:
                table.chances.record(0, table.after[token][0] == came)
            table.after[token] = after

    def _table(self, seq: SequenceState) -> _Table:
        return self._tables.get(seq, self._shared)


LONGEST = 8  # the most tokens of the answer's end that are matched to find an anchor
# Prior chance of a token by the number of correct tokens in a row since the anchor.
PRIOR_IN_INPUT = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.9, 0.9, 0.95)


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
    chances: AcceptanceStats = field(default_factory=lambda: AcceptanceStats(PRIOR_IN_INPUT))


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
        for place, token in enumerate(seq.tokens[: seq.prompt]):
            places.setdefault(token, []).append(place)
        self._copies[seq] = _Copy(seq.prompt, places)

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence's anchor."""
        super().end(seq)
        self._copies.pop(seq, None)

    def look_up(self, seq: SequenceState, max_tokens: int) -> Proposal:
        """Return at most `max_tokens` tokens of the prompt from the anchor on, up to an end token."""
        copy = self._copies.get(seq)
        if copy is None or copy.next_position is None:
            return NO_PROPOSAL
        tokens = list[int]()
        for token in seq.tokens[copy.next_position : min(copy.next_position + max_tokens, copy.size)]:
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
