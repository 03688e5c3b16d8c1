"""Command-line options as plain data, so that options classes describe them without a command-line library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Command-line option for a dataclass field, as in `Annotated[int, Option(help="Trials.", min=1)]`.

    `flags`: the option's names, if they differ from the field's. `metavar`: the value's name in the help. `min` and
    `max`: inclusive bounds. `panel`: the option's group heading in the help. `hidden`: the option is rare, and only the
    full help shows it.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    min: float | None = None
    max: float | None = None
    panel: str | None = None
    hidden: bool = False
