"""How much a command says on standard error, as `--quiet` and `--verbose` set it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from selfspec.basics.errors import SelfspecError

Level = Literal["quiet", "normal", "verbose"]
_level: ContextVar[Level] = ContextVar("level", default="normal")


def verbosity() -> Level:
    """Return how much the running command says: what `--quiet` or `--verbose` set, else `normal`."""
    return _level.get()


@contextmanager
def speaking(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """Set `verbosity` for the time of a command. Raises `SelfspecError` if both are given."""
    if quiet and verbose:
        raise SelfspecError("--quiet and --verbose: expected only one of the two")
    token = _level.set("quiet" if quiet else "verbose" if verbose else "normal")
    try:
        yield
    finally:
        _level.reset(token)
