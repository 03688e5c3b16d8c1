"""The interface of checkers: whatever can say what it would have emitted in place of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from selfspec.speculation.drafts import Draft
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Scored:
    """A draft's rows (the root's, then each token's): processed scores `[1 + m, V]`, and the pass they are from."""

    scores: Tensor
    step: ForwardOutput


class Checker(Protocol):
    """The whole model, a draft path of it, or another model: drafts are judged by what it would have emitted."""

    @property
    def trees(self) -> bool:
        """Whether it can check trees; else only chains."""

    def score(
        self, seqs: Sequence[SequenceState], drafts: Sequence[Draft], *, hidden: Sequence[int] = ()
    ) -> list[Scored]:
        """One pass over all rows of all drafts; scores are processed as plain decoding of each sequence would.

        `hidden`: the layers whose streams are returned.
        """

    def keep(self, seqs: Sequence[SequenceState], paths: Sequence[tuple[int, ...]]) -> None:
        """Keep each draft's root and the nodes on its path, and forget the rest."""
