"""The interface of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from selfspec.speculation.drafts import Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import Work
from selfspec.types.limits import WIDEST_DRAFT


class Limit(NamedTuple):
    """How large a draft may be: tokens on its longest path, and tokens in all."""

    depth: int
    nodes: int = WIDEST_DRAFT


class Drafter(Protocol):
    """Proposes tokens for sequences, round by round.

    Nothing hangs below an end-of-sequence token. In sampling, what is drafted may depend on what was drawn before,
    never on the drawn token itself. All randomness comes from each sequence's own sampler, and what is drafted for a
    sequence does not depend on the sequences beside it.
    """

    @property
    def hidden(self) -> Sequence[int]:
        """Layers whose streams the full passes should return in `Step.hidden`."""

    @property
    def drafts(self) -> bool:
        """Whether it ever proposes anything."""

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """A sequence starts; `prefill` is the full pass over its prompt but the last token (no logits).

        Without `hidden`, it may be a pass over less, where the cache holds the keys of the prompt's beginning.
        """

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """One draft for each sequence, within its limit; an empty one makes its round a plain decoding step."""

    def max_work(self, limit: Limit) -> Work:
        """The most work that a draft within the limit can take."""

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """A round of `seq` was verified; `seq.tokens` already holds what was emitted."""

    def end(self, seq: SequenceState) -> None:
        """The sequence is over, however it ended; called once for each `begin`."""
