"""The search: which sub-layers of this model, on this machine, to bypass. From Python: `find_profile`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .prepare import Trial, Watch
    from .study import AnotherFinishes, find_profile

__all__ = ["AnotherFinishes", "Trial", "Watch", "find_profile"]


def __getattr__(name: str) -> Any:
    """Import torch and the model code only when a search is run."""
    if name in __all__:
        from . import prepare, study

        return getattr(prepare if name in ("Trial", "Watch") else study, name)
    raise AttributeError(f"module 'selfspec.search' has no attribute '{name}'")
