"""The interface of checkers, which compute a verification pass over drafts."""

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
        """Whether token trees can be verified; otherwise only drafts without branches can."""

    def score(
        self, seqs: Sequence[SequenceState], drafts: Sequence[Draft], *, hidden: Sequence[int] = ()
    ) -> list[Scored]:
        """Return each draft's scores from one verification pass, with logits processors applied as in plain decoding.

        `hidden`: the layers whose hidden states are returned, numbered as in `ForwardOutput.hidden`.
        """

    def keep(self, seqs: Sequence[SequenceState], paths: Sequence[tuple[int, ...]]) -> None:
        """Keep the keys and values of each draft's root and accepted nodes `paths`; discard those of rejected nodes."""
