"""How a search tells what it does: its stages, and every trial."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from .objective import Score

_log = logging.getLogger("selfspec")


@dataclass(frozen=True, slots=True)
class Trial:
    """One skip set, and what it is worth. `known`: it had been scored before, or by another worker."""

    number: int
    score: Score
    known: bool


class SearchCallbacks(Protocol):
    """Is told how a search goes."""

    def stage(self, name: str, total: int | None) -> None:
        """What happens next, and in how many steps if that is known."""

    def step(self, done: int) -> None:
        """How many steps of the stage are done."""

    def trial(self, trial: Trial) -> None:
        """A trial is done."""

    def say(self, line: str) -> None:
        """What is worth reading, in a line: about how long the search will take."""


class SilentSearch:
    """Tells nobody."""

    def stage(self, name: str, total: int | None) -> None:
        """Nothing."""

    def step(self, done: int) -> None:
        """Nothing."""

    def trial(self, trial: Trial) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Nothing."""


class Logged(SilentSearch):
    """Tells the log `selfspec`, as information."""

    def stage(self, name: str, total: int | None) -> None:
        """Its name."""
        _log.info("%s", name)

    def trial(self, trial: Trial) -> None:
        """Its speedup, and of what."""
        _log.info(
            "trial %d: %.3gx plain decoding predicted, %s", trial.number + 1, trial.score.speedup, trial.score.path.said
        )

    def say(self, line: str) -> None:
        """The line."""
        _log.info("%s", line)
