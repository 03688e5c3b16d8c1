"""Layer-skip self-drafting (Draft & Verify, Zhang et al. 2309.08168): the model itself, some sub-layers bypassed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import Controller, Play
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
            self.controller = self.controller.start()

    def propose(self, seqs: Sequence[SequenceState]) -> list[Draft]:
        """A chain for each sequence, with further candidates for its places where they were asked for."""
        return [self._draft(seq) for seq in seqs]

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Tell the controller what was accepted of the chain, and whether another candidate was."""
        draft, path = outcome.draft, outcome.path
        drafted = len(draft.confidence)
        other = bool(path) and path[-1] >= drafted
        self.controller.observe(draft.confidence, len(path) - other, candidates=len(draft), other=other)

    def end(self, seq: SequenceState) -> None:
        """Nothing to clean up: the scratch slots are the runtime's."""

    def _draft(self, seq: SequenceState) -> Draft:
        tokens: list[int] = []
        rows: list[Tensor] = []
        last, position = seq.tokens[-1], len(seq.tokens) - 1
        play = Play(self.controller, depth=min(seq.room - 1, self.deepest))
        while play.wants:
            row = self._row(seq, tokens, last, position + len(tokens))
            if not seq.sampler.possible(row) or (self._head is not None and not float(row.max()) > -math.inf):
                break
            q = seq.sampler.probs(row)
            last = int(row.argmax()) if seq.sampler.greedy else seq.sampler.draw(q, position + len(tokens) + 1)
            tokens.append(last)
            rows.append(row if seq.sampler.greedy else q)
            play.see(float(q[last]), last=last in seq.ends)
        if not tokens:
            return NO_DRAFT
        chain = Draft.chain(tokens, q=None if seq.sampler.greedy else torch.stack(rows), confidence=play.confidences)
        counts = play.candidates(self.siblings, nodes=WIDEST_DRAFT)
        if max(counts) == 1:
            return chain
        if seq.sampler.greedy:
            return chain.with_leaves(_likeliest(rows, tokens, counts))
        places = range(position + 1, position + 1 + len(tokens))
        drawn = [self._drawn(seq, *one) for one in zip(rows, tokens, counts, places, strict=True)]
        return chain.with_leaves(drawn)

    def _drawn(self, seq: SequenceState, q: Tensor, token: int, count: int, position: int) -> list[int]:
        """The other candidates, `count` with `token`, the first: drawn from `q` `[V]` in order, without replacement."""
        drawn = [token]
        while len(drawn) < count:
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
    """For each row of scores `[V]`, its best tokens other than the drafted one; with it they are `counts`."""
    most = min(max(counts), len(rows[0]))
    best = torch.stack(list(rows)).topk(most).indices.tolist()
    return [
        [other for other in row if other != token][: count - 1]
        for row, token, count in zip(best, tokens, counts, strict=True)
    ]
