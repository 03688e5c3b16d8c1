"""Several drafters' proposals in one token tree, verified together (SpecInfer, Miao et al. 2305.09781)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.speculation.drafter import Drafter, Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import DraftCall, Work


class MergedDrafter:
    """Lets each of `drafters` propose, in their order, and merges what they propose into one tree.

    What the first propose leaves less room for the others. Raises `ValueError` for no drafter.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ValueError("expected at least one drafter")
        self.drafters = tuple(drafters)
        self._proposed: dict[SequenceState, tuple[Draft, ...]] = {}

    @property
    def hidden(self) -> Sequence[int]:
        """The layers whose streams any of the drafters reads."""
        return sorted({layer for drafter in self.drafters for layer in drafter.hidden})

    @property
    def drafts(self) -> bool:
        """Whether any drafter ever proposes anything."""
        return any(drafter.drafts for drafter in self.drafters)

    def max_work(self, limit: Limit) -> Work:
        """Each drafter's own dearest draft."""
        return _sum([drafter.max_work(limit) for drafter in self.drafters])

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Each drafter's sequence starts."""
        for drafter in self.drafters:
            drafter.begin(seq, prefill)

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """What all propose for each sequence."""
        found: list[list[Draft]] = [[] for _ in seqs]
        for drafter in self.drafters:
            left = [limit.nodes - sum(map(len, own)) for limit, own in zip(limits, found, strict=True)]
            open_ = [i for i, nodes in enumerate(left) if nodes > 0]
            within = [Limit(limits[i].depth, left[i]) for i in open_]
            drafts = drafter.propose([seqs[i] for i in open_], within) if open_ else []
            own = dict(zip(open_, drafts, strict=True))
            for i, of in enumerate(found):
                of.append(own.get(i, NO_DRAFT))
        self._proposed.update((seq, tuple(drafts)) for seq, drafts in zip(seqs, found, strict=True))
        return [
            merged(drafts, drawn=not (seq.sampler.greedy or seq.sampler.tied))
            for seq, drafts in zip(seqs, found, strict=True)
        ]

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Each drafter is told of the round as if the rest of the tree had stood behind its own draft."""
        proposed = self._proposed.pop(seq, ()) if len(outcome.draft) else ()
        for drafter, draft in zip(self.drafters, proposed or [NO_DRAFT] * len(self.drafters), strict=True):
            drafter.observe(seq, seen_by(draft, outcome))

    def end(self, seq: SequenceState) -> None:
        """The sequence is over for all."""
        self._proposed.pop(seq, None)
        for drafter in self.drafters:
            drafter.end(seq)


def merged(drafts: Sequence[Draft], *, drawn: bool) -> Draft:
    """One tree of several drafts: tokens that stand at the same place are one node, the first draft's first.

    `drawn`: whether tokens with a row of q are judged by it (untied sampling). Such a token stays a node of its own,
    even where another drafter proposed it too: it was drawn, and to drop it for its value would change what is emitted.
    What hangs below it then hangs below the first of the two, whose acceptance is the likelier; one that is chosen
    deterministically is dropped where it is there already.
    """
    drafts = [draft for draft in drafts if len(draft)]
    if len(drafts) < 2:
        return drafts[0] if drafts else NO_DRAFT
    tokens, parents, rows, sources = list[int](), list[int](), list[int](), list[str]()
    q: list[Tensor] = []
    at: dict[tuple[int, int], int] = {}  # by parent and token, the first such node
    for draft in drafts:
        before = sum(map(len, q))
        places: list[int] = []  # of the draft's nodes
        for i, (token, parent, row) in enumerate(zip(draft.tokens, draft.parents, draft.q_row, strict=True)):
            above = places[parent] if parent >= 0 else -1
            known = at.get((above, token))
            if known is None or (drawn and row >= 0):
                tokens.append(token)
                parents.append(above)
                rows.append(row if row < 0 else before + row)
                sources.append(draft.sources[i] if draft.sources else "")
                known = at.setdefault((above, token), len(tokens) - 1)
            places.append(known)
        if draft.q is not None:
            q.append(draft.q)
    named = tuple(sources) if any(sources) else ()
    work = _sum([draft.work for draft in drafts])
    return Draft(tuple(tokens), tuple(parents), torch.cat(q) if q else None, tuple(rows), (), work, named)


def seen_by(draft: Draft, outcome: Outcome) -> Outcome:
    """A round as the drafter of one of the merged drafts sees it: its own nodes first, the rest of the tree behind.

    Rows of the verification go with their nodes.
    """
    whole = outcome.draft
    if draft is whole:
        return outcome
    order = _found(draft, whole)
    places: dict[int, int] = {}  # of the tree's nodes, in what the drafter sees
    for i, node in enumerate(order):
        if node >= 0:
            places.setdefault(node, i)
    behind = [node for node in range(len(whole)) if node not in places]
    places.update((node, len(order) + i) for i, node in enumerate(behind))
    above = [whole.parents[node] for node in behind]
    seen = Draft(
        (*draft.tokens, *(whole.tokens[node] for node in behind)),
        (*draft.parents, *(places[parent] if parent >= 0 else -1 for parent in above)),
        q_row=(-1,) * (len(order) + len(behind)),
        confidence=draft.confidence,
        work=whole.work,
    )
    rows = torch.tensor([0, *(node + 1 for node in (*order, *behind))])
    logits = outcome.step.logits
    step = replace(
        outcome.step,
        logits=None if logits is None else logits[:, rows.to(logits.device)],
        hidden={layer: of[:, rows.to(of.device)] for layer, of in outcome.step.hidden.items()},
    )
    chances = None if outcome.p is None else outcome.p[rows.to(outcome.p.device)]
    return Outcome(seen, tuple(places[node] for node in outcome.path), outcome.tokens, step, chances)


def _found(draft: Draft, whole: Draft) -> list[int]:
    """Where a draft's nodes are in the tree; -1: nowhere, as where a runtime takes no trees."""
    first: dict[tuple[int, int], int] = {}
    for node, key in enumerate(zip(whole.parents, whole.tokens, strict=True)):
        first.setdefault(key, node)
    own: list[int] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        above = own[parent] if parent >= 0 else -1
        own.append(-1 if parent >= 0 and above < 0 else first.get((above, token), -1))
    return own


def _sum(works: Sequence[Work]) -> Work:
    total: dict[DraftCall, int] = {}
    for work in works:
        for part, calls in work:
            total[part] = total.get(part, 0) + calls
    return tuple(total.items())
