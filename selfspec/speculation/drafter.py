"""The interface of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from selfspec.speculation.drafts import Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import Work
from selfspec.types.methods import WIDEST_DRAFT


class Limit(NamedTuple):
    """The largest draft allowed: `depth`, tokens on its longest path, and `nodes`, all its tokens.

    `lookup`: the most tokens of a draft that is looked up without a pass of a model, where that is more than `depth`.
    """

    depth: int
    nodes: int = WIDEST_DRAFT
    lookup: int = 0


class Drafter(Protocol):
    """The source of drafts for sequences, round by round.

    No token is drafted below an end-of-sequence token. When sampling, the choice to draft a token may depend on earlier
    draws, never on the draw of that token itself. All randomness comes from the sequence's `sampler`, and the draft of
    a sequence does not depend on the other sequences of the batch.
    """

    @property
    def hidden(self) -> Sequence[int]:
        """Layers whose hidden states the full passes shall return in `ForwardOutput.hidden`."""

    @property
    def drafts(self) -> bool:
        """Whether the drafter ever proposes tokens."""

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Start a sequence; `prefill` is the full pass over its prompt without the last token (no logits).

        If `hidden` is empty, `prefill` may lack the prompt's first tokens, whose keys and values were cached already.
        """

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return one draft for each sequence, within its limit; an empty draft makes a plain decode step."""

    def max_work(self, limit: Limit) -> Work:
        """Return the most work that a draft within the limit can take."""

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Learn from a verified round of `seq`; `seq.tokens` already includes the emitted tokens."""

    def end(self, seq: SequenceState) -> None:
        """End the sequence, for whatever reason; called once for each `begin`."""


class DelegatingDrafter:
    """A drafter that does what another `drafter` does; a subclass changes some of it."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    @property
    def hidden(self) -> Sequence[int]:
        """The layers whose hidden states the drafter reads."""
        return self.drafter.hidden

    @property
    def drafts(self) -> bool:
        """Whether the drafter ever proposes a token."""
        return self.drafter.drafts

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Start a sequence."""
        self.drafter.begin(seq, prefill)

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return the drafter's drafts."""
        return self.drafter.propose(seqs, limits)

    def max_work(self, limit: Limit) -> Work:
        """Return the drafter's `max_work`."""
        return self.drafter.max_work(limit)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Let the drafter learn."""
        self.drafter.observe(seq, outcome)

    def end(self, seq: SequenceState) -> None:
        """End the sequence."""
        self.drafter.end(seq)
