"""Commands whose help shows no type beside a flag: `--json`, not `--json <bool>`."""

from __future__ import annotations

from typing import Any

import typer.core


class PlainCommand(typer.core.TyperCommand):
    """A command whose flags, `--help` among them, have no type in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, of which flags have an empty metavar."""
        return _without_types(super().get_params(ctx))


class PlainGroup(typer.core.TyperGroup):
    """A group of commands whose flags, `--help` among them, have no type in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, of which flags have an empty metavar."""
        return _without_types(super().get_params(ctx))


def _without_types(params: list[Any]) -> list[Any]:
    """Return a command's parameters, of which flags have an empty metavar."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params
