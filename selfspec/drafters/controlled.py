"""The base class of drafters that a controller steers, and the drafters that run no model: plain and lookup."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import BatchDraftScheduler, Controller, DraftLoop
from selfspec.controllers.batch_scheduler import AcceptanceHistory
from selfspec.proposers.base import Proposal, Proposer, ProposerChain, ProposerState
from selfspec.runtime.device_rounds import RoundPlan
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import LOOKUP_WORK, NO_WORK, Work
from selfspec.types.methods import WIDEST_DRAFT

_NOTHING = ProposerChain().new_state()


def check_candidates(count: int) -> None:
    """Raise `SelfspecError` if the number of candidates is below 1, or more than a verification pass holds."""
    if not 1 <= count <= WIDEST_DRAFT:
        raise SelfspecError(f"candidates {count}: expected 1 (the drafted token itself) to {WIDEST_DRAFT}")


def as_draft(proposal: Proposal, confidence: Sequence[float] = ()) -> Draft:
    """Convert lookup tokens to a draft.

    `confidence`: a value for each token if a controller decided on the tokens, else empty.
    """
    if not proposal.tokens:
        return NO_DRAFT
    sources = [proposal.source] * len(proposal.tokens)
    return Draft.chain(proposal.tokens, confidence=confidence, work=LOOKUP_WORK, sources=sources)


class ControlledDrafter:
    """Base of drafters with a controller and proposers.

    `controller`: each seeded sequence gets a fresh copy; all other sequences share one controller, which learns from
    them all. `proposer_chain`: the proposers that look up a sequence's next tokens. With a scheduler `load` and several
    sequences in the batch, controllers only estimate acceptance chances, and `load` decides which sequences draft.
    """

    hidden: Sequence[int] = ()
    drafts = True

    load: BatchDraftScheduler | None = None  # scheduler of the whole batch; None: controllers decide
    teaches = True  # whether proposers that learn get the texts

    def __init__(self, controller: Controller, proposer_chain: ProposerChain) -> None:
        self.controller = controller
        self.proposer_chain = proposer_chain
        self._own: dict[SequenceState, Controller] = {}
        self._proposer_states: dict[SequenceState, ProposerState] = {}
        self._histories: dict[SequenceState, AcceptanceHistory] = {}

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Create the sequence's proposer state and acceptance history, and for a seeded sequence a fresh controller.

        Proposers read the prompt here: that takes 9 ms for 4,096 tokens, which no draft shall be charged with.
        """
        self._histories[seq] = AcceptanceHistory()
        literals = () if seq.continuation is None else seq.continuation.literals
        state = self.proposer_chain.new_state(prompt=seq.prompt, seeded=seq.sampler.seeded, before=literals)
        state.read(seq.tokens)
        self._proposer_states[seq] = state
        if seq.sampler.seeded:
            self._own[seq] = self.controller.start()

    def end(self, seq: SequenceState) -> None:
        """Pass a finished text to proposers that learn, and forget the sequence; the runtime frees its scratch slots.

        A text that has not ended may only have been preempted.
        """
        self._own.pop(seq, None)
        self._histories.pop(seq, None)
        if (state := self._proposer_states.pop(seq, None)) is not None and self.teaches and not seq.remaining:
            state.finish(seq.tokens)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Report to the controller how many drafted tokens were accepted, and how many of other branches."""
        draft, path = outcome.draft, outcome.path
        if not draft.confidence:  # no controller took part in this draft
            return
        accepted = sum(node < len(draft.confidence) for node in path)
        other = len(path) - accepted
        if seq in self._histories:
            self._histories[seq].record(accepted > 0)
        self.controller_of(seq).observe(draft.confidence, accepted, candidates=len(draft), other=other)

    def controller_of(self, seq: SequenceState) -> Controller:
        """Return the controller of a sequence's drafts, with the costs at the sequence's length."""
        controller = self._own.get(seq, self.controller)
        controller.set_context(len(seq.tokens))
        return controller

    @property
    def _scheduler(self) -> BatchDraftScheduler | None:
        """The scheduler `load`, unless the batch decodes a single sequence, whose controller decides."""
        return self.load if self.load is not None and self.load.rows > 1 else None

    def first_chance(self, seq: SequenceState, shared: float) -> float:
        """Return the chance that the first token of the sequence's next draft is accepted; `shared`: in all drafts."""
        history = self._histories.get(seq)
        return shared if history is None else history.chance(shared)

    def proposer_state(self, seq: SequenceState) -> ProposerState:
        """Return the sequence's proposer state; an empty state if `begin` was not called, as in cost measurements."""
        return self._proposer_states.get(seq, _NOTHING)

    def look_up(self, seq: SequenceState, max_tokens: int) -> Proposal:
        """Update the sequence's proposers to its current text and return at most `max_tokens` lookup tokens."""
        state = self.proposer_state(seq)
        state.read(seq.tokens)
        return state.lookup(max_tokens, seq.ends)


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
        if (load := self._scheduler) is None:
            return drafts
        counts = load.lookup_lengths([draft.confidence for draft in drafts])
        return [draft.backbone().first(count) for draft, count in zip(drafts, counts, strict=True)]

    def _drafted(self, seq: SequenceState, limit: Limit) -> Draft:
        max_tokens = min(limit.depth, limit.nodes)
        proposal = self.look_up(seq, max_tokens)
        loop = DraftLoop(self.controller_of(seq), depth=max_tokens)
        for token, chance in zip(proposal.tokens, proposal.chances, strict=True):
            if not loop.record(chance, token):
                break
        return as_draft(proposal.cut(len(loop.confidences)), loop.confidences)


class PlainDrafter:
    """Drafter without proposals: every round is one full pass over one token."""

    hidden: Sequence[int] = ()
    drafts = False

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Do nothing: the drafter has no state."""

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return an empty draft for each sequence."""
        return [NO_DRAFT] * len(seqs)

    def plan_round(self, seqs: Sequence[SequenceState], limit: Limit, *, ahead: bool) -> RoundPlan | None:
        """Return a plain decode step."""
        return RoundPlan()

    def max_work(self, limit: Limit) -> Work:
        """Return no work."""
        return NO_WORK

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Do nothing: the drafter does not learn."""

    def end(self, seq: SequenceState) -> None:
        """Do nothing: the drafter has no state."""
