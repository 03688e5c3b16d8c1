"""Plain decoding: the drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome, SequenceState
from selfspec.speculation.step import Step


class PlainDrafter:
    """Proposes nothing, so that every round is one full pass over one token."""

    hidden: Sequence[int] = ()

    def begin(self, seq: SequenceState, prefill: Step) -> None:
        """Nothing to prepare."""

    def propose(self, seqs: Sequence[SequenceState]) -> list[Draft]:
        """No drafts."""
        return [NO_DRAFT] * len(seqs)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Nothing to learn."""

    def end(self, seq: SequenceState) -> None:
        """Nothing to clean up."""
