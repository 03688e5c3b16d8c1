"""What making a draft took: calls of priced parts. Plain data for drafters, the guard, statistics and cost models."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """One kind of call that drafts are made of: its name, and how many tokens of the sequence go through it at once."""

    name: str
    rows: int = 1

    def __str__(self) -> str:
        return self.name if self.rows == 1 else f"{self.name} of {self.rows} rows"


DRAFT_STEP = Part("draft step")  # one token through a draft path
Work = tuple[tuple[Part, int], ...]  # each part once, with how often it was called; () is free
NO_WORK: Work = ()


def steps_of(drafted: int) -> Work:
    """The work of a chain that a draft path drafts token by token."""
    return ((DRAFT_STEP, drafted),) if drafted else NO_WORK
