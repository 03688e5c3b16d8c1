"""The help of commands: flags without a type, an example and a docs page at the end, rare options by `--help-all`.

An option that is declared `hidden` is rare: `--help` leaves it out and `--help-all` shows it.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core


def more(page: str, example: str) -> str:
    """Return the end of a command's help: an example command line, and the command's page in docs/."""
    return f"Example: {example}\n\nMore: docs/{page}"


class _PlainFlags:
    """Mixin of commands whose flags, `--help` among them, have no type in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, of which flags have an empty metavar."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class PlainCommand(_PlainFlags, typer.core.TyperCommand):
    """A command without types of flags in its help."""


class PlainGroup(_PlainFlags, typer.core.TyperGroup):
    """A group of commands without types of flags in its help."""


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the help of a command with its hidden options, and exit."""
    if not wanted:
        return
    for param in ctx.command.params:
        if isinstance(param, typer.core.TyperOption):
            param.hidden = False
    typer.echo(ctx.get_help(), nl=False)
    raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", is_eager=True, expose_value=False, callback=_show_all, help="Show all options, also rare ones."
    ),
]
