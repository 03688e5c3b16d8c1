"""The work of making a draft: how many calls of each kind. Plain data for drafters, guard, statistics and costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class DraftCall(NamedTuple):
    """One kind of call in drafting: its name, and the number of tokens that it processes at once."""

    name: str
    rows: int = 1

    def __str__(self) -> str:
        return self.name if self.rows == 1 else f"{self.name} of {self.rows} rows"


# Names of token sources; the source of lookup tokens is the proposer's name.
DRAFT_PATH, DRAFT_MODEL, RECYCLED = "draft path", "draft model", "recycle"
INPUT, JACOBI, LOOKAHEAD, GUIDE = "input", "jacobi", "lookahead", "guide"
DRAFT_STEP = DraftCall("draft step")  # one token through a draft path
HEAD_STEP = DraftCall("head step")  # one step of a trained draft head below a draft path
LOOKUP_CALL = DraftCall("lookup")  # a lookup, without a model's pass
Work = tuple[tuple[DraftCall, int], ...]  # each kind of call once, with its number of calls; () costs nothing
NO_WORK: Work = ()
LOOKUP_WORK: Work = ((LOOKUP_CALL, 1),)


def steps_of(drafted: int) -> Work:
    """Return the work of drafting `drafted` tokens, each by a draft step over one token."""
    return ((DRAFT_STEP, drafted),) if drafted else NO_WORK


def passes_of(widths: Iterable[int]) -> Work:
    """Return the work of draft-path passes of these widths in tokens."""
    return tuple((draft_pass(rows), calls) for rows, calls in sorted(Counter(widths).items()))


def with_head_steps(work: Work, steps: int) -> Work:
    """Return `work` with `steps` additional steps of a draft head below the path."""
    return (*work, (HEAD_STEP, steps)) if steps else work


def draft_pass(rows: int) -> DraftCall:
    """Return the call of one draft-path pass over `rows` tokens."""
    return DraftCall(DRAFT_STEP.name, rows)
