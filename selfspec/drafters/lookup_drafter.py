"""Drafts that no model computes: what proposers guess, verified as it is."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.controllers import Controller, DraftLoop
from selfspec.drafters.controlled import PlayedDrafter, guessed
from selfspec.proposers.base import Proposer
from selfspec.proposers.chain import ProposerChain
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import GUESSED, NO_WORK, Work


class FreeDrafter(PlayedDrafter):
    """Drafts the guess of the proposer that expects most tokens; `controller` cuts it, told each token's chance.

    Guesses follow from a sequence's own text. Each sequence with a seed starts the controller afresh.
    """

    def __init__(self, proposers: Sequence[Proposer], controller: Controller) -> None:
        super().__init__(controller, ProposerChain(proposers))

    def max_work(self, limit: Limit) -> Work:
        """A guess, however long."""
        return GUESSED if min(limit.depth, limit.nodes) > 0 else NO_WORK

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """One for each sequence; several together no more than the load allows."""
        drafts = [self._drafted(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
        if self.load is None or len(seqs) < 2:
            return drafts
        counts = self.load.free([draft.confidence for draft in drafts])
        return [draft.backbone().first(count) for draft, count in zip(drafts, counts, strict=True)]

    def _drafted(self, seq: SequenceState, limit: Limit) -> Draft:
        room = min(limit.depth, limit.nodes)
        guess = self.guess(seq, room)
        play = DraftLoop(self.controller_of(seq), depth=room)
        for chance in guess.chances:
            if not play.see(chance):
                break
        return guessed(guess.cut(len(play.confidences)), play.confidences)
