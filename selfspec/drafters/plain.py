"""Plain decoding: a drafter that never proposes a token."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.runtime.device_rounds import RoundPlan
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import NO_WORK, Work


class PlainDrafter:
    """Drafter without proposals: every round is one full pass over one token."""

    hidden: Sequence[int] = ()
    drafts = False

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Do nothing: the drafter has no state."""

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return an empty draft for each sequence."""
        return [NO_DRAFT] * len(seqs)

    def plan_round(self, seqs: Sequence[SequenceState], limit: Limit, *, ahead: bool) -> RoundPlan:
        """Return a plain decode step."""
        return RoundPlan()

    def max_work(self, limit: Limit) -> Work:
        """Return no work."""
        return NO_WORK

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Do nothing: the drafter does not learn."""

    def end(self, seq: SequenceState) -> None:
        """Do nothing: the drafter has no state."""
