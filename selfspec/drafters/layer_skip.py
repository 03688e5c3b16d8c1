"""Layer-skip self-drafting (Draft & Verify, Zhang et al. 2309.08168): the model itself, some sub-layers bypassed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.controllers import K_LIMIT, Controller
from selfspec.drafts import NO_DRAFT, Draft, Outcome, SequenceState
from selfspec.errors import SelfspecError
from selfspec.runtime import Runtime, Step
from selfspec.skip import SkipSet


class LayerSkipDrafter:
    """Drafts with the sub-layers in `skip` bypassed, on the model's own keys and values.

    Its own keys go to the slots that verification then overwrites. `controller` ends a draft; with a seeded
    sampler it starts each sequence afresh, otherwise it keeps what it learnt. `siblings`: candidates for each
    position, the one that the draft goes on from counted; 1 drafts a chain. `vocabulary`: the only tokens that are
    ever drafted, which makes the draft's head as much cheaper; it holds a copy of their weights. Raises
    `SelfspecError` when `skip` names a layer that the model does not have, for no candidate or more than a
    verification holds, and for a vocabulary that `Runtime.head_over` refuses.
    """

    hidden: Sequence[int] = ()

    def __init__(
        self,
        runtime: Runtime,
        skip: SkipSet,
        controller: Controller,
        *,
        siblings: int = 1,
        vocabulary: Sequence[int] | None = None,
    ) -> None:
        skip.check(runtime.layers)
        if not 1 <= siblings <= K_LIMIT:
            raise SelfspecError(f"siblings {siblings}: want 1 (the drafted token itself) to {K_LIMIT}")
        self.runtime = runtime
        self.skip = skip
        self.controller = controller
        self.siblings = siblings if vocabulary is None else min(siblings, max(1, len(vocabulary)))
        self._head = None if vocabulary is None else runtime.head_over(vocabulary)
        self.deepest = K_LIMIT // siblings  # so that all candidates fit into one verification

    def begin(self, seq: SequenceState, prefill: Step) -> None:
        """Start the controller afresh when the sequence has a seed."""
        if seq.sampler.seeded:
            self.controller = self.controller.fresh()

    def propose(self, seqs: Sequence[SequenceState]) -> list[Draft]:
        """A chain for each sequence, with leaves beside it where siblings were asked for."""
        return [self._draft(seq) for seq in seqs]

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Tell the controller what was accepted of the chain."""
        drafted = len(outcome.draft.confidence)
        self.controller.observe(outcome.draft.confidence, sum(node < drafted for node in outcome.path))

    def end(self, seq: SequenceState) -> None:
        """Nothing to clean up: the scratch slots are the runtime's."""

    def _draft(self, seq: SequenceState) -> Draft:
        tokens: list[int] = []
        leaves: list[list[int]] = []
        rows: list[Tensor] = []
        confidences: list[float] = []
        last, position = seq.tokens[-1], len(seq.tokens) - 1
        while len(tokens) < min(seq.room - 1, self.deepest):
            row = self._row(seq, tokens, last, position + len(tokens))
            if not seq.sampler.possible(row) or (self._head is not None and not float(row.max()) > -math.inf):
                break
            if seq.sampler.greedy:
                candidates = (
                    [int(row.argmax())]
                    if self.siblings == 1
                    else row.topk(min(self.siblings, len(row))).indices.tolist()
                )
                confidence = float(row.softmax(-1)[candidates[0]])
            else:
                q = seq.sampler.probs(row)
                rows.append(q)
                candidates = self._drawn(seq, q, position + len(tokens) + 1)
                confidence = float(q[candidates[0]])
            last = candidates[0]
            tokens.append(last)
            leaves.append(candidates[1:])
            confidences.append(confidence)
            if last in seq.ends or not self.controller.go_on(confidence, len(tokens)):
                break
        if not tokens:
            return NO_DRAFT
        chain = Draft.chain(tokens, q=torch.stack(rows) if rows else None, confidence=confidences)
        return chain.with_leaves(leaves) if self.siblings > 1 else chain

    def _drawn(self, seq: SequenceState, q: Tensor, position: int) -> list[int]:
        """Candidates drawn from `q` `[V]` one after the other, without replacement."""
        drawn = [seq.sampler.draw(q, position)]
        while len(drawn) < self.siblings:
            left = q.index_fill(0, torch.tensor(drawn, device=q.device), 0)
            if not float(left.sum()) > 0:
                break
            drawn.append(seq.sampler.draw(left, position))
        return drawn

    def _row(self, seq: SequenceState, drafted: Sequence[int], last: int, position: int) -> Tensor:
        """Processed scores `[V]` of the token after `last`."""
        step = self.runtime.forward(
            torch.tensor([[last]], device=self.runtime.device),
            position,
            skip=self.skip,
            rows=slice(seq.row, seq.row + 1),
            head=self._head,
        )
        assert step.logits is not None
        prefix = ([*seq.tokens, *drafted] for _ in range(1))  # made only if a processor reads it
        return seq.sampler.scores(step.logits[0], prefix)[0]
