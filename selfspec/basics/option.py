"""A command-line option as plain data: options are described where they are defined, without a command-line library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How the command line offers a field, as in `Annotated[int, Option(help="Trials.", min=1)]`.

    `flags`: the option's names, where these are not the field's own. `metavar`: the value's name in the help. `min` and
    `max`: inclusive bounds. `panel`: the heading of the help below which the option stands.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    min: float | None = None
    max: float | None = None
    panel: str | None = None
