"""Parallel (Jacobi) decoding as a fixed-point iteration (Santilli et al. 2305.10427): each pass refines a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from selfspec.basics.errors import SelfspecError
from selfspec.drafters.controlled import as_draft
from selfspec.proposers.base import Proposal
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import JACOBI, LOOKUP_WORK, NO_WORK, Work

JacobiMethod = Literal["jacobi", "gauss-seidel", "hybrid"]
Start = Literal["padding", "prompt", "before"]


@dataclass(slots=True)
class _Block:
    """The current block of one sequence, at positions `begin` to `end` - 1; `prompt`: the prompt's length.

    `guess`: the current iterate of the tokens after the text.
    """

    prompt: int
    begin: int
    end: int
    guess: list[int] = field(default_factory=list)
    sent: tuple[int, ...] = ()  # the part of the guess in the verification pass


class JacobiDrafter:
    """Jacobi drafter: drafts the tokens that the last pass predicted for a block, so a pass is one Jacobi iteration.

    Methods: `jacobi` uses one block for all remaining tokens, cut to the size of a verification pass. `gauss-seidel`
    uses blocks of `block` tokens, each converged before the next begins. `hybrid` uses gauss-seidel for the first
    `parallel` tokens of an answer, then plain decoding. Converged tokens are committed, so a block takes at most as
    many passes as it has tokens.

    `start`: the initial token of an unknown position. `padding`: the lowest token id that is not an end-of-sequence
    token; `prompt`: the prompt's token at the same offset; `before`: the token one block earlier. An end-of-sequence
    token in an unconverged block ends the draft, not the text. Raises `SelfspecError` for blocks of fewer than two
    tokens, and if `parallel` is below 1.
    """

    hidden: Sequence[int] = ()
    drafts = True

    def __init__(
        self, method: JacobiMethod = "gauss-seidel", *, block: int = 8, parallel: int = 64, start: Start = "before"
    ) -> None:
        if block < 2 or parallel < 1:
            raise SelfspecError(
                f"block {block}, parallel {parallel}: expected blocks of 2 tokens or more, parallel above 0"
            )
        self.method, self.block, self.parallel, self.start = method, block, parallel, start
        self._blocks: dict[SequenceState, _Block] = {}

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Place the first block after the prompt."""
        n = len(seq.tokens)
        self._blocks[seq] = _Block(n, n, n)

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence's block."""
        self._blocks.pop(seq, None)

    def max_work(self, limit: Limit) -> Work:
        """Return the work of one lookup draft, whatever its length."""
        return LOOKUP_WORK if min(limit.depth, limit.nodes) > 0 else NO_WORK

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return, for each sequence, the current iterate of its block's uncommitted positions."""
        return [self._drafted(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Replace the iterate at each uncommitted position with the pass's argmax there."""
        if (block := self._blocks.get(seq)) is None:
            return
        sent, block.sent = block.sent, ()
        drafted = len(sent) if outcome.draft.tokens[: len(sent)] == sent else 0
        emitted = len(outcome.path) + 1
        known = block.guess[max(emitted, drafted + 1) :]
        assert outcome.step.logits is not None
        block.guess = outcome.step.logits[0, emitted : drafted + 1].argmax(-1).tolist() + known

    def _drafted(self, seq: SequenceState, limit: Limit) -> Draft:
        n, max_tokens = len(seq.tokens), min(limit.depth, limit.nodes)
        block = self._blocks.get(seq)
        if block is None or (self.method == "hybrid" and n - block.prompt >= self.parallel):
            return Draft()
        if n >= block.end:
            size = max_tokens + 1 if self.method == "jacobi" else self.block
            block.begin, block.end, block.guess = n, n + size, []
        deep = max(0, min(block.end - n - 1, max_tokens))
        block.guess += [self._first(seq, block, place) for place in range(n + len(block.guess), n + deep)]
        tokens = list[int]()
        for token in block.guess[:deep]:
            tokens.append(token)
            if token in seq.ends:
                break
        block.sent = tuple(tokens)
        return as_draft(Proposal(tokens, (), JACOBI))

    def _first(self, seq: SequenceState, block: _Block, place: int) -> int:
        """Return the initial token of an unknown position `place`, by the option `start`."""
        earlier = place - (block.end - block.begin if self.start == "before" else block.prompt)
        known = earlier < len(seq.tokens) if self.start == "before" else earlier < block.prompt
        if self.start != "padding" and earlier >= 0 and known and seq.tokens[earlier] not in seq.ends:
            return seq.tokens[earlier]
        return next(token for token in count() if token not in seq.ends)
