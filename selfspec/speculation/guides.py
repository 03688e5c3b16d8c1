"""Drafts of the tokens that a sequence's guide forces, in front of what a drafter proposes."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.speculation.drafter import Drafter, Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import GUIDE, LOOKUP_WORK

LEAST = 2  # fewest forced tokens that are verified alone: where a drafter proposes too, fewer are left to it


def guide_draft(seq: SequenceState, limit: Limit) -> Draft:
    """Return the tokens that the sequence's guide forces, as a draft within the limit; empty without a guide."""
    most = min(limit.depth, limit.nodes)
    if seq.continuation is None or most < 1:
        return NO_DRAFT
    tokens = seq.continuation.propose(seq.tokens, most)
    return Draft.chain(tokens, work=LOOKUP_WORK, sources=[GUIDE] * len(tokens)) if tokens else NO_DRAFT


def propose_guided(drafter: Drafter, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
    """Return a draft for each sequence: what its guide forces, or if that is little, what the drafter proposes.

    A drafter that never drafts keeps guides from drafting, too: decoding is plain.
    """
    if not drafter.drafts or all(seq.continuation is None for seq in seqs):
        return drafter.propose(seqs, limits)
    drafts = [guide_draft(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
    asked = [i for i, draft in enumerate(drafts) if len(draft) < LEAST]
    if asked:
        proposed = drafter.propose([seqs[i] for i in asked], [limits[i] for i in asked])
        for i, draft in zip(asked, proposed, strict=True):
            if len(draft) or not len(drafts[i]):
                drafts[i] = draft
    return drafts
