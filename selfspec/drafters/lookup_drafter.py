"""Lookup drafter: drafts that proposers look up and no model computes."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.controllers import Controller, DraftLoop
from selfspec.drafters.controlled import ControlledDrafter, as_draft
from selfspec.proposers.base import Proposer
from selfspec.proposers.chain import ProposerChain
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import LOOKUP_WORK, NO_WORK, Work


class LookupDrafter(ControlledDrafter):
    """Drafter without a draft model: drafts the lookup tokens of the proposer with the most expected right tokens.

    `controller` ends the draft, by each lookup token's chance to be right. Each seeded sequence gets a fresh copy of
    the controller.
    """

    def __init__(self, proposers: Sequence[Proposer], controller: Controller) -> None:
        super().__init__(controller, ProposerChain(proposers))

    def max_work(self, limit: Limit) -> Work:
        """Return the work of one lookup draft, whatever its length."""
        return LOOKUP_WORK if min(limit.depth, limit.nodes) > 0 else NO_WORK

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return a draft for each sequence; in a batch, the scheduler `load` may shorten the drafts."""
        drafts = [self._drafted(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
        if self.load is None or len(seqs) < 2:
            return drafts
        counts = self.load.lookup_lengths([draft.confidence for draft in drafts])
        return [draft.backbone().first(count) for draft, count in zip(drafts, counts, strict=True)]

    def _drafted(self, seq: SequenceState, limit: Limit) -> Draft:
        max_tokens = min(limit.depth, limit.nodes)
        proposal = self.look_up(seq, max_tokens)
        loop = DraftLoop(self.controller_of(seq), depth=max_tokens)
        for chance in proposal.chances:
            if not loop.record(chance):
                break
        return as_draft(proposal.cut(len(loop.confidences)), loop.confidences)
