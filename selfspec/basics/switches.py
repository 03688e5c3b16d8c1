"""Environment variables that turn something on or off."""

from __future__ import annotations

import os

_VALUES = {**dict.fromkeys(("1", "on", "true", "yes"), True), **dict.fromkeys(("0", "off", "false", "no"), False)}


def switched(variable: str) -> bool | None:
    """Return whether an environment variable turns something on (1, on, true, yes) or off (0, ..); else None."""
    return _VALUES.get(os.environ.get(variable, "").strip().lower())
