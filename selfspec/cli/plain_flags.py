"""Commands whose help shows no type beside a flag: `--json`, not `--json <bool>`."""

from __future__ import annotations

from typing import Any

import typer.core


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
