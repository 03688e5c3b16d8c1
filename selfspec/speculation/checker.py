"""The interface of checkers, which score drafts in a verification pass."""

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
    """A draft's processed scores `[1 + m, V]` (the root's row, then each token's), and the output of the pass."""

    scores: Tensor
    step: ForwardOutput


class Checker(Protocol):
    """The verifier of drafts: the whole model, a draft path of it, or another model."""

    @property
    def trees(self) -> bool:
        """Whether it can verify token trees; otherwise only chains."""

    def score(
        self, seqs: Sequence[SequenceState], drafts: Sequence[Draft], *, hidden: Sequence[int] = ()
    ) -> list[Scored]:
        """Score all drafts in one verification pass, processed as in plain decoding of each sequence.

        `hidden`: the layers whose residual streams are returned.
        """

    def keep(self, seqs: Sequence[SequenceState], paths: Sequence[tuple[int, ...]]) -> None:
        """Keep the keys and values of each draft's root and of the nodes on its path; discard the others."""
