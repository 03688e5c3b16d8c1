"""What drafters have in common that a controller plays: whose controller it is, and what is guessed of each text."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import BatchDraftScheduler, Controller
from selfspec.proposers.base import Guess
from selfspec.proposers.chain import ProposerChain, ProposerState
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import GUESSED
from selfspec.types.limits import WIDEST_DRAFT

_NOTHING = ProposerChain().reading()


def check_candidates(count: int) -> None:
    """Raise `SelfspecError` for no candidate, or more than a verification holds."""
    if not 1 <= count <= WIDEST_DRAFT:
        raise SelfspecError(f"candidates {count}: expected 1 (the drafted token itself) to {WIDEST_DRAFT}")


def guessed(guess: Guess, confidence: Sequence[float] = ()) -> Draft:
    """A guess as a draft; `confidence`: where a controller was told of each token."""
    if not guess.tokens:
        return NO_DRAFT
    sources = [guess.source] * len(guess.tokens)
    return Draft.chain(guess.tokens, confidence=confidence, work=GUESSED, sources=sources)


class PlayedDrafter:
    """`controller`: each sequence with a seed starts it afresh, all others share what it learns.

    `ahead`: what guesses how a sequence's text goes on. With a `load` controllers tell how likely tokens are right, and
    it says who drafts them, wherever several sequences draft together.
    """

    hidden: Sequence[int] = ()
    drafts = True

    load: BatchDraftScheduler | None = None  # decides for several sequences together, whose rounds it is told of

    def __init__(self, controller: Controller, ahead: ProposerChain) -> None:
        self.controller = controller
        self.ahead = ahead
        self._own: dict[SequenceState, Controller] = {}
        self._readings: dict[SequenceState, ProposerState] = {}

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """A text of its own, and a controller where it has a seed."""
        self._readings[seq] = self.ahead.reading(prompt=len(seq.tokens), seeded=seq.sampler.seeded)
        if seq.sampler.seeded:
            self._own[seq] = self.controller.start()

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence, once proposers that learn have; the scratch slots are the runtime's."""
        self._own.pop(seq, None)
        if (reading := self._readings.pop(seq, None)) is not None:
            reading.ended(seq.tokens)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Tell the controller what was accepted of the chain, and whether another candidate was."""
        draft, path = outcome.draft, outcome.path
        if not draft.confidence:  # the controller had no part in it
            return
        accepted = sum(node < len(draft.confidence) for node in path)
        other = len(path) > accepted
        self.controller_of(seq).observe(draft.confidence, accepted, candidates=len(draft), other=other)

    def controller_of(self, seq: SequenceState) -> Controller:
        """The controller that plays a sequence's drafts."""
        return self._own.get(seq, self.controller)

    def reading(self, seq: SequenceState) -> ProposerState:
        """What guesses the sequence's text; nothing does of one that did not begin here, as when costs are measured."""
        return self._readings.get(seq, _NOTHING)

    def guess(self, seq: SequenceState, room: int) -> Guess:
        """How the sequence's text may go on, `room` tokens at most, read up to where it is now."""
        reading = self.reading(seq)
        reading.read(seq.tokens)
        return reading.free(room, seq.ends)
