"""Callbacks for a search's progress: its stages, and every trial."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from .objective import Score

_log = logging.getLogger("selfspec")


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial: the score of one draft path.

    `number`: from 0. `known`: whether the path was scored in an earlier search or by another worker. `timed`: whether
    the score was measured by decoding, rather than predicted.
    """

    number: int
    score: Score
    known: bool
    timed: bool = False

    @property
    def speedup(self) -> str:
        """The speedup, and how it is known."""
        return f"{self.score.speedup:.2f}x plain decoding {'measured' if self.timed else 'predicted'}"


class SearchCallbacks(Protocol):
    """Receives the progress of a search."""

    def stage(self, name: str, total: int | None) -> None:
        """Begin a stage of `total` steps (None: unknown)."""

    def step(self, done: int) -> None:
        """Report how many steps of the stage are done."""

    def trial(self, trial: Trial) -> None:
        """Report a completed trial."""

    def say(self, line: str) -> None:
        """Report a line of text, such as the expected duration of the search."""


class SilentSearch:
    """Callbacks that do nothing."""

    def stage(self, name: str, total: int | None) -> None:
        """Do nothing."""

    def step(self, done: int) -> None:
        """Do nothing."""

    def trial(self, trial: Trial) -> None:
        """Do nothing."""

    def say(self, line: str) -> None:
        """Do nothing."""


class Logged(SilentSearch):
    """Callbacks that write to the log `selfspec`, at level INFO."""

    def stage(self, name: str, total: int | None) -> None:
        """Log the stage's name."""
        _log.info("%s", name)

    def trial(self, trial: Trial) -> None:
        """Log the trial's speedup and draft path."""
        _log.info(
            "trial %d: %s, %s",
            trial.number + 1,
            trial.speedup,
            trial.score.path.summary,
        )

    def say(self, line: str) -> None:
        """Log the line."""
        _log.info("%s", line)
