"""How much a command says on standard error, as `--quiet` and `--verbose` set it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from selfspec.basics.errors import SelfspecError

Level = Literal["quiet", "normal", "verbose"]
_LOG_LEVELS = {"quiet": logging.ERROR, "normal": logging.WARNING, "verbose": logging.INFO}
_level: ContextVar[Level] = ContextVar("level", default="normal")


def verbosity() -> Level:
    """Return how much the running command says: what `--quiet` or `--verbose` set, else `normal`."""
    return _level.get()


@contextmanager
def speaking(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """Set `verbosity`, and the level of selfspec's log, for the time of a command.

    Raises `SelfspecError` if both are given.
    """
    if quiet and verbose:
        raise SelfspecError("--quiet and --verbose: expected only one of the two")
    token = _level.set("quiet" if quiet else "verbose" if verbose else "normal")
    log = logging.getLogger("selfspec")
    before = log.level
    log.setLevel(_LOG_LEVELS[verbosity()])
    try:
        yield
    finally:
        log.setLevel(before)
        _level.reset(token)
