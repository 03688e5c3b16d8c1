"""Plain decoding: the drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import NO_WORK, Work


class PlainDrafter:
    """Proposes nothing, so that every round is one full pass over one token."""

    hidden: Sequence[int] = ()
    drafts = False

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Nothing to prepare."""

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """No drafts."""
        return [NO_DRAFT] * len(seqs)

    def max_work(self, limit: Limit) -> Work:
        """Nothing."""
        return NO_WORK

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Nothing to learn."""

    def end(self, seq: SequenceState) -> None:
        """Nothing to clean up."""
