"""Token recycling (Luo et al. 2408.08696): draft the tokens that the model's last logits ranked highest."""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.controllers import Controller, DraftLoop
from selfspec.drafters.controlled import as_draft, check_candidates
from selfspec.drafters.lookup_drafter import LookupDrafter
from selfspec.proposers.base import AcceptanceStats, Proposal
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import RECYCLED

FIRST = 0.35  # prior chance that a recycled successor is right, before the text has given evidence


@dataclass(slots=True)
class _Table:
    """The most probable successors of each token, by the last logits after that token.

    `chances`: how often the first successor is right.
    """

    after: dict[int, list[int]] = field(default_factory=dict)
    chances: AcceptanceStats = field(default_factory=lambda: AcceptanceStats((FIRST,)))


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
            loop.record(table.chances(0), last=token in seq.ends)
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
