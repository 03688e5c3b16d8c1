"""Merging of several drafters' proposals into one token tree (SpecInfer, Miao et al. 2305.09781)."""

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
    """Drafter that merges the proposals of `drafters` into one token tree.

    The drafters propose in order; each leaves fewer nodes for the next. Raises `ValueError` for no drafter.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ValueError("expected at least one drafter")
        self.drafters = tuple(drafters)
        self._proposed: dict[SequenceState, tuple[Draft, ...]] = {}

    @property
    def hidden(self) -> Sequence[int]:
        """The layers whose hidden states any of the drafters reads."""
        return sorted({layer for drafter in self.drafters for layer in drafter.hidden})

    @property
    def drafts(self) -> bool:
        """Whether any drafter ever proposes a token."""
        return any(drafter.drafts for drafter in self.drafters)

    def max_work(self, limit: Limit) -> Work:
        """Return the sum of all drafters' `max_work`."""
        return _sum([drafter.max_work(limit) for drafter in self.drafters])

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Start the sequence in each drafter."""
        for drafter in self.drafters:
            drafter.begin(seq, prefill)

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return the merged draft of all drafters for each sequence."""
        proposals: list[list[Draft]] = [[] for _ in seqs]
        for drafter in self.drafters:
            left = [limit.nodes - sum(map(len, own)) for limit, own in zip(limits, proposals, strict=True)]
            open_ = [i for i, nodes in enumerate(left) if nodes > 0]
            within = [limits[i]._replace(nodes=left[i], lookup=min(limits[i].lookup, left[i])) for i in open_]
            drafts = drafter.propose([seqs[i] for i in open_], within) if open_ else []
            own = dict(zip(open_, drafts, strict=True))
            for i, seq_drafts in enumerate(proposals):
                seq_drafts.append(own.get(i, NO_DRAFT))
        self._proposed.update((seq, tuple(drafts)) for seq, drafts in zip(seqs, proposals, strict=True))
        return [
            merged(drafts, drawn=not (seq.sampler.greedy or seq.sampler.tied))
            for seq, drafts in zip(seqs, proposals, strict=True)
        ]

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Report the round to each drafter: nodes of that drafter's draft first, then all other nodes of the tree."""
        proposed = self._proposed.pop(seq, ()) if len(outcome.draft) else ()
        for drafter, draft in zip(self.drafters, proposed or [NO_DRAFT] * len(self.drafters), strict=True):
            drafter.observe(seq, reordered_outcome(draft, outcome))

    def end(self, seq: SequenceState) -> None:
        """End the sequence in each drafter."""
        self._proposed.pop(seq, None)
        for drafter in self.drafters:
            drafter.end(seq)


def merged(drafts: Sequence[Draft], *, drawn: bool) -> Draft:
    """Merge several drafts into one tree: equal tokens below one parent become one node, in the order of the drafts.

    `drawn`: whether tokens with a row of q are verified by it (untied sampling). Then a token drawn from q stays a
    separate node even if another drafter proposed the same token: dropping the token because of its value would change
    the output distribution. The children of equal nodes are attached to the first of these nodes, which is the most
    likely to be accepted. A deterministically chosen token is dropped if an equal node exists.
    """
    drafts = [draft for draft in drafts if len(draft)]
    if len(drafts) < 2:
        return drafts[0] if drafts else NO_DRAFT
    tokens, parents, rows, sources = list[int](), list[int](), list[int](), list[str]()
    q: list[Tensor] = []
    node_ids: dict[tuple[int, int], int] = {}  # first node of each (parent, token)
    for draft in drafts:
        before = sum(map(len, q))
        places: list[int] = []  # merged node of each of the draft's nodes
        for i, (token, parent, row) in enumerate(zip(draft.tokens, draft.parents, draft.q_row, strict=True)):
            above = places[parent] if parent >= 0 else -1
            known = node_ids.get((above, token))
            if known is None or (drawn and row >= 0):
                tokens.append(token)
                parents.append(above)
                rows.append(row if row < 0 else before + row)
                sources.append(draft.sources[i] if draft.sources else "")
                known = node_ids.setdefault((above, token), len(tokens) - 1)
            places.append(known)
        if draft.q is not None:
            q.append(draft.q)
    named = tuple(sources) if any(sources) else ()
    work = _sum([draft.work for draft in drafts])
    return Draft(tuple(tokens), tuple(parents), torch.cat(q) if q else None, tuple(rows), (), work, named)


def reordered_outcome(draft: Draft, outcome: Outcome) -> Outcome:
    """Return the round's outcome reordered for one drafter: the nodes of its `draft` first, then all other nodes.

    The rows of logits, hidden states and probabilities are reordered with the nodes.
    """
    tree = outcome.draft
    if draft is tree:
        return outcome
    order = _tree_nodes(draft, tree)
    places: dict[int, int] = {}  # index of each of the tree's nodes in the reordered draft
    for i, node in enumerate(order):
        if node >= 0:
            places.setdefault(node, i)
    behind = [node for node in range(len(tree)) if node not in places]
    places.update((node, len(order) + i) for i, node in enumerate(behind))
    above = [tree.parents[node] for node in behind]
    reordered = Draft(
        (*draft.tokens, *(tree.tokens[node] for node in behind)),
        (*draft.parents, *(places[parent] if parent >= 0 else -1 for parent in above)),
        q_row=(-1,) * (len(order) + len(behind)),
        confidence=draft.confidence,
        work=tree.work,
    )
    rows = torch.tensor([0, *(node + 1 for node in (*order, *behind))])
    logits = outcome.step.logits
    step = replace(
        outcome.step,
        logits=None if logits is None else logits[:, rows.to(logits.device)],
        hidden={
            layer: hidden_states[:, rows.to(hidden_states.device)]
            for layer, hidden_states in outcome.step.hidden.items()
        },
    )
    chances = None if outcome.p is None else outcome.p[rows.to(outcome.p.device)]
    return Outcome(reordered, tuple(places[node] for node in outcome.path), outcome.tokens, step, chances)


def _tree_nodes(draft: Draft, tree: Draft) -> list[int]:
    """Return the tree node of each node of the draft; -1: not in the tree, as if the checker verifies no trees."""
    first: dict[tuple[int, int], int] = {}
    for node, key in enumerate(zip(tree.parents, tree.tokens, strict=True)):
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
