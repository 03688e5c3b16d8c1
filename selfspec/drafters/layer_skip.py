"""Layer-skip self-drafting (Draft & Verify, Zhang et al. 2309.08168): the model itself, some sub-layers bypassed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.controllers import Controller
from selfspec.drafts import NO_DRAFT, Draft, Outcome, SequenceState
from selfspec.runtime import Runtime, Step
from selfspec.skip import SkipSet


class LayerSkipDrafter:
    """Drafts a chain with the sub-layers in `skip` bypassed, on the model's own keys and values.

    Its own keys go to the slots that verification then overwrites. `controller` ends a draft; with a seeded
    sampler it starts each sequence afresh, otherwise it keeps what it learnt. Raises `SelfspecError` when `skip`
    names a layer that the model does not have.
    """

    hidden: Sequence[int] = ()

    def __init__(self, runtime: Runtime, skip: SkipSet, controller: Controller) -> None:
        skip.check(runtime.layers)
        self.runtime = runtime
        self.skip = skip
        self.controller = controller

    def begin(self, seq: SequenceState, prefill: Step) -> None:
        """Start the controller afresh when the sequence has a seed."""
        if seq.sampler.seeded:
            self.controller = self.controller.fresh()

    def propose(self, seqs: Sequence[SequenceState]) -> list[Draft]:
        """A chain for each sequence."""
        return [self._chain(seq) for seq in seqs]

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Tell the controller what was accepted."""
        self.controller.observe(outcome.draft.confidence, len(outcome.path))

    def end(self, seq: SequenceState) -> None:
        """Nothing to clean up: the scratch slots are the runtime's."""

    def _chain(self, seq: SequenceState) -> Draft:
        tokens: list[int] = []
        rows: list[Tensor] = []
        confidences: list[float] = []
        last, position = seq.tokens[-1], len(seq.tokens) - 1
        while len(tokens) < seq.room - 1:
            row = self._row(seq, tokens, last, position + len(tokens))
            if seq.sampler.greedy:
                last = int(row.argmax())
                confidence = float(row.softmax(-1)[last])
            else:
                q = seq.sampler.probs(row)
                rows.append(q)
                last = seq.sampler.draw(q, position + len(tokens) + 1)
                confidence = float(q[last])
            tokens.append(last)
            confidences.append(confidence)
            if last in seq.ends or not self.controller.go_on(confidence, len(tokens)):
                break
        if not tokens:
            return NO_DRAFT
        return Draft.chain(tokens, q=torch.stack(rows) if rows else None, confidence=confidences)

    def _row(self, seq: SequenceState, drafted: Sequence[int], last: int, position: int) -> Tensor:
        """Processed scores `[V]` of the token after `last`."""
        step = self.runtime.forward(
            torch.tensor([[last]], device=self.runtime.device),
            position,
            skip=self.skip,
            rows=slice(seq.row, seq.row + 1),
        )
        assert step.logits is not None
        prefix = ([*seq.tokens, *drafted] for _ in range(1))  # made only if a processor reads it
        return seq.sampler.scores(step.logits[0], prefix)[0]
