"""Options that all commands on models have beside their own: `--revision`, `--quiet`, `--verbose` and `--help-all`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any, get_args

import typer

from selfspec.cli.command_help import HelpAll
from selfspec.cli.verbosity import speaking
from selfspec.models.hub_names import with_revision

_OPTIONS = {
    "revision": Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub id that --model names; also as ID@REVISION.")
    ],
    "quiet": Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no progress, notes and warnings; errors are printed.")
    ],
    "verbose": Annotated[
        bool, typer.Option("--verbose", "-v", help="Print also what was chosen, and the messages of libraries.")
    ],
}


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer with the further options; `command` has the parameter `model`.

    `--help-all` is one of them if the command has hidden options.

    The command raises `SelfspecError` if the options do not go together.
    """

    @functools.wraps(command)
    def run(*, revision: str | None, quiet: bool, verbose: bool, **values: Any) -> None:
        with speaking(quiet=quiet, verbose=verbose):
            if revision is not None:
                values["model"] = with_revision(values["model"], revision)
            command(**values)

    signature = inspect.signature(command)
    own = signature.parameters.values()
    rare = any(getattr(mark, "hidden", False) for param in own for mark in get_args(param.annotation)[1:])
    more = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None if name == "revision" else False, annotation=option)
        for name, option in (_OPTIONS | ({"help_all": HelpAll} if rare else {})).items()
    ]
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*own, *more]
    )
    return run
