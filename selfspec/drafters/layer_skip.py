"""Layer-skip self-drafting (Draft & Verify, Zhang et al. 2309.08168): the model itself, some sub-layers bypassed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import Controller
from selfspec.facts.limits import WIDEST_DRAFT
from selfspec.facts.skip import SkipSet
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome, SequenceState
from selfspec.speculation.step import Step


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
        if not 1 <= siblings <= WIDEST_DRAFT:
            raise SelfspecError(f"siblings {siblings}: want 1 (the drafted token itself) to {WIDEST_DRAFT}")
        self.runtime = runtime
        self.skip = skip
        self.controller = controller
        self.siblings = siblings if vocabulary is None else min(siblings, max(1, len(vocabulary)))
        self._head = None if vocabulary is None else runtime.head_over(vocabulary)
        self.deepest = WIDEST_DRAFT // siblings  # so that all candidates fit into one verification

    def begin(self, seq: SequenceState, prefill: Step) -> None:
        """Start the controller afresh when the sequence has a seed."""
        if seq.sampler.seeded:
            self.controller = self.controller.fresh()

    def propose(self, seqs: Sequence[SequenceState]) -> list[Draft]:
        """A chain for each sequence, with leaves beside it where siblings were asked for."""
        return [self._draft(seq) for seq in seqs]

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Tell the controller what was accepted of the chain, and whether a candidate beside it was."""
        draft, path = outcome.draft, outcome.path
        drafted = len(draft.confidence)
        leaf = bool(path) and path[-1] >= drafted
        self.controller.observe(draft.confidence, len(path) - leaf, candidates=len(draft) - drafted, leaf=leaf)

    def end(self, seq: SequenceState) -> None:
        """Nothing to clean up: the scratch slots are the runtime's."""

    def _draft(self, seq: SequenceState) -> Draft:
        tokens: list[int] = []
        rows: list[Tensor] = []
        confidences: list[float] = []
        last, position = seq.tokens[-1], len(seq.tokens) - 1
        while len(tokens) < min(seq.room - 1, self.deepest):
            row = self._row(seq, tokens, last, position + len(tokens))
            if not seq.sampler.possible(row) or (self._head is not None and not float(row.max()) > -math.inf):
                break
            q = seq.sampler.probs(row)
            last = int(row.argmax()) if seq.sampler.greedy else seq.sampler.draw(q, position + len(tokens) + 1)
            tokens.append(last)
            rows.append(row if seq.sampler.greedy else q)
            confidences.append(float(q[last]))
            if last in seq.ends or not self.controller.go_on(confidences):
                break
        if not tokens:
            return NO_DRAFT
        chain = Draft.chain(tokens, q=None if seq.sampler.greedy else torch.stack(rows), confidence=confidences)
        counts = self.controller.beside(confidences, self.siblings - 1) if self.siblings > 1 else ()
        if not any(counts):
            return chain
        if seq.sampler.greedy:
            return chain.with_leaves(_likeliest(rows, tokens, counts))
        places = range(position + 1, position + 1 + len(tokens))
        drawn = [self._drawn(seq, *one) for one in zip(rows, tokens, counts, places, strict=True)]
        return chain.with_leaves(drawn)

    def _drawn(self, seq: SequenceState, q: Tensor, token: int, count: int, position: int) -> list[int]:
        """Tokens drawn from `q` `[V]` one after the other without replacement, after `token`."""
        drawn = [token]
        while len(drawn) <= count:
            left = q.index_fill(0, torch.tensor(drawn, device=q.device), 0)
            if not float(left.sum()) > 0:
                break
            drawn.append(seq.sampler.draw(left, position))
        return drawn[1:]

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


def _likeliest(rows: Sequence[Tensor], tokens: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """For each row of scores `[V]`, so many tokens of the highest beside the one drafted."""
    most = min(max(counts) + 1, len(rows[0]))
    best = torch.stack(list(rows)).topk(most).indices.tolist()
    return [
        [other for other in row if other != token][:count]
        for row, token, count in zip(best, tokens, counts, strict=True)
    ]
