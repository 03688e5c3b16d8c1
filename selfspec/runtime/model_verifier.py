"""The target model as the verifier of drafts."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.runtime.base import Runtime
from selfspec.speculation.drafts import Draft
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.rounds import Scored
from selfspec.speculation.sequence import SequenceState
from selfspec.speculation.tree_batch import PlacedDraft


class ModelChecker:
    """Verifies drafts by passes of the full target model; each sequence has one row of the KV cache."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @property
    def trees(self) -> bool:
        """Whether the runtime can verify token trees."""
        return self.runtime.trees

    def score(
        self, seqs: Sequence[SequenceState], drafts: Sequence[Draft], *, hidden: Sequence[int] = ()
    ) -> list[Scored]:
        """Run one verification pass over all drafts, each rooted at its sequence's last token.

        `hidden`: layers whose input hidden states are returned too, as in `Runtime.forward`.
        """
        placed = [
            PlacedDraft(seq.row, seq.tokens[-1], len(seq.tokens) - 1, draft)
            for seq, draft in zip(seqs, drafts, strict=True)
        ]
        steps = self.runtime.forward_drafts(placed, hidden=hidden)
        return [self._scored(*args) for args in zip(seqs, drafts, steps, strict=True)]

    @staticmethod
    def _scored(seq: SequenceState, draft: Draft, step: ForwardOutput) -> Scored:
        assert step.logits is not None
        return Scored(seq.sampler.draft_scores(step.logits[0], draft, seq.tokens, seq.ends), step)

    def keep(self, seqs: Sequence[SequenceState], paths: Sequence[tuple[int, ...]]) -> None:
        """Commit each sequence's accepted path: compact its keys and values, and advance the row's length."""
        for seq, path in zip(seqs, paths, strict=True):
            self.runtime.cache.commit(seq.row, path)
