"""What making a draft took: calls of priced parts. Plain data for drafters, the guard, statistics and cost models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class DraftCall(NamedTuple):
    """One kind of call that drafts are made of: its name, and how many tokens of the sequence go through it at once."""

    name: str
    rows: int = 1

    def __str__(self) -> str:
        return self.name if self.rows == 1 else f"{self.name} of {self.rows} rows"


# What tokens came from; of what is guessed, the proposer's name.
DRAFT_PATH, DRAFT_MODEL, RECYCLED = "draft path", "draft model", "recycle"
INPUT, JACOBI, LOOKAHEAD = "input", "jacobi", "lookahead"
DRAFT_STEP = DraftCall("draft step")  # one token through a draft path
HEAD_STEP = DraftCall("head step")  # of a trained head that guesses below a draft path
GUESS = DraftCall("guess")  # what no model computes
Work = tuple[tuple[DraftCall, int], ...]  # each part once, with how often it was called; () is free
NO_WORK: Work = ()
GUESSED: Work = ((GUESS, 1),)


def steps_of(drafted: int) -> Work:
    """The work of a chain that a draft path drafts token by token."""
    return ((DRAFT_STEP, drafted),) if drafted else NO_WORK


def passes_of(widths: Iterable[int]) -> Work:
    """The work of a draft path's passes over so many tokens each."""
    return tuple((draft_pass(rows), calls) for rows, calls in sorted(Counter(widths).items()))


def with_head_steps(work: Work, steps: int) -> Work:
    """The same, and so many steps of a head below."""
    return (*work, (HEAD_STEP, steps)) if steps else work


def draft_pass(rows: int) -> DraftCall:
    """So many tokens through a draft path at once."""
    return DraftCall(DRAFT_STEP.name, rows)
