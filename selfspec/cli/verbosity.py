"""How much a command says on standard error: the options `--quiet` and `--verbose`, and what they set."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from inspect import Parameter
from typing import Annotated, Any, Literal

import typer

from selfspec.basics.errors import SelfspecError

Level = Literal["quiet", "normal", "verbose"]
_level: ContextVar[Level] = ContextVar("level", default="normal")
_OPTIONS = {
    "quiet": Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no progress, notes and warnings; errors are printed.")
    ],
    "verbose": Annotated[
        bool, typer.Option("--verbose", "-v", help="Print also what was chosen, and the messages of libraries.")
    ],
}


def verbosity() -> Level:
    """Return how much the running command says: what `--quiet` or `--verbose` set, else `normal`."""
    return _level.get()


def with_verbosity(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer with the further options `--quiet` and `--verbose`, which `verbosity` reports.

    The command raises `SelfspecError` if both are given.
    """

    @functools.wraps(command)
    def run(*, quiet: bool, verbose: bool, **values: Any) -> None:
        if quiet and verbose:
            raise SelfspecError("--quiet and --verbose: expected only one of the two")
        token = _level.set("quiet" if quiet else "verbose" if verbose else "normal")
        try:
            command(**values)
        finally:
            _level.reset(token)

    signature = inspect.signature(command)
    more = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=option) for name, option in _OPTIONS.items()
    ]
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *more]
    )
    return run
