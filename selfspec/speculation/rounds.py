"""One round: draft, verify, update the KV cache, learn. Plain decoding is a drafter that proposes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.speculation.drafter import Drafter, Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import GUIDE, LOOKUP_WORK


@dataclass(frozen=True, slots=True)
class Scored:
    """A draft's processed scores `[1 + m, V]` (the root's row, then each token's), and the output of the pass."""

    scores: Tensor
    step: ForwardOutput


class Checker(Protocol):
    """The verifier of drafts: the whole model, a draft path of it, or another model."""

    @property
    def trees(self) -> bool:
        """Whether token trees can be verified; otherwise only drafts without branches can."""

    def score(
        self, seqs: Sequence[SequenceState], drafts: Sequence[Draft], *, hidden: Sequence[int] = ()
    ) -> list[Scored]:
        """Return each draft's scores from one verification pass, with logits processors applied as in plain decoding.

        `hidden`: the layers whose hidden states are returned, numbered as in `ForwardOutput.hidden`.
        """

    def keep(self, seqs: Sequence[SequenceState], paths: Sequence[tuple[int, ...]]) -> None:
        """Keep the keys and values of each draft's root and accepted nodes `paths`; discard those of rejected nodes."""


def one_round(
    checker: Checker, drafter: Drafter, seqs: Sequence[SequenceState], limits: Sequence[Limit]
) -> list[Outcome]:
    """Run one round for sequences that may still emit tokens; drafts stay within `limits`, and depth 0 means no draft.

    Raises `SelfspecError` for a draft beyond its limit, and whatever drafters, processors and rules raise; no token has
    been cached or emitted then. What a sequence's `stop` raises, or a drafter's `observe`, comes after tokens of the
    sequences before it, or of all of them, have been emitted.
    """
    drafts = _proposed(drafter, seqs, limits)
    if not checker.trees:
        drafts = [draft if draft.is_chain else _first_branch(draft) for draft in drafts]
    scored = checker.score(seqs, drafts, hidden=drafter.hidden)
    verdicts = [
        seq.verification_rule()(draft, result.scores, seq.sampler, len(seq.tokens))
        for seq, draft, result in zip(seqs, drafts, scored, strict=True)
    ]
    checker.keep(seqs, [verdict.path for verdict in verdicts])
    outcomes = []
    for seq, draft, result, verdict in zip(seqs, drafts, scored, verdicts, strict=True):
        emitted = seq.emit([*(draft.tokens[node] for node in verdict.path), verdict.token])
        outcomes.append(Outcome(draft, verdict.path, emitted, result.step, verdict.p))
    for seq, outcome in zip(seqs, outcomes, strict=True):
        drafter.observe(seq, outcome)
    return outcomes


def _first_branch(draft: Draft) -> Draft:
    """Return the first branch of a draft, and say once that the others are left out."""
    warnings.warn(
        "drafts with branches are cut to their first branch: this model verifies chains of tokens only", stacklevel=3
    )
    return draft.backbone()


def _proposed(drafter: Drafter, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
    """Return a draft for each sequence, from one call of the drafter for all that may draft, and from guides."""
    drafting = [i for i, limit in enumerate(limits) if limit.depth > 0]
    drafts = [NO_DRAFT] * len(seqs)
    if drafting:
        proposals = propose_guided(drafter, [seqs[i] for i in drafting], [limits[i] for i in drafting])
        for i, draft in zip(drafting, proposals, strict=True):
            if len(draft) > limits[i].nodes or draft.depth > limits[i].depth:
                raise SelfspecError(
                    f"{type(drafter).__name__} drafted {len(draft)} tokens, {draft.depth} deep; expected at most "
                    f"{limits[i].nodes} tokens, {limits[i].depth} deep"
                )
            drafts[i] = draft
    return drafts


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
