"""Drafts that no model computes: what proposers guess, verified as it is."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.controllers import Controller, Play
from selfspec.facts.work import GUESSED, NO_WORK, Work
from selfspec.proposers.ahead import Ahead, Reading
from selfspec.proposers.base import Proposer
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.sequence import SequenceState
from selfspec.speculation.step import Step


class FreeDrafter:
    """Drafts the guess of the proposer that expects most tokens; `controller` cuts it, told each token's chance.

    Guesses follow from a sequence's own text. Each sequence with a seed starts the controller afresh.
    """

    hidden: Sequence[int] = ()
    drafts = True

    def __init__(self, proposers: Sequence[Proposer], controller: Controller) -> None:
        self.controller = controller
        self._ahead = Ahead(proposers, ())
        self._own: dict[SequenceState, Controller] = {}
        self._readings: dict[SequenceState, Reading] = {}

    def begin(self, seq: SequenceState, prefill: Step) -> None:
        """A text of its own."""
        self._readings[seq] = self._ahead.reading()
        if seq.sampler.seeded:
            self._own[seq] = self.controller.start()

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence."""
        self._readings.pop(seq, None)
        self._own.pop(seq, None)

    def controller_of(self, seq: SequenceState) -> Controller:
        """The controller that plays a sequence's drafts."""
        return self._own.get(seq, self.controller)

    def dearest(self, limit: Limit) -> Work:
        """A guess, however long."""
        return GUESSED if min(limit.depth, limit.nodes) > 0 else NO_WORK

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """A chain for each sequence."""
        return [self._drafted(seq, min(limit.depth, limit.nodes)) for seq, limit in zip(seqs, limits, strict=True)]

    def _drafted(self, seq: SequenceState, room: int) -> Draft:
        reading = self._readings[seq]
        reading.read(seq.tokens)
        guess = reading.free(room, seq.ends)
        play = Play(self.controller_of(seq), depth=room)
        for chance in guess.chances:
            if not play.see(chance):
                break
        n = len(play.confidences)
        return Draft.chain(guess.tokens[:n], confidence=play.confidences, work=GUESSED) if n else NO_DRAFT

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Tell the controller what was accepted."""
        self.controller_of(seq).observe(outcome.draft.confidence, len(outcome.path))
