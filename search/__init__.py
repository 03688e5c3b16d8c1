"""Search for the fastest draft path of a model on this machine. From Python: `find_profile`, `read_prompts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfspec.text.prompt_files import Prompts, read_prompts

    from .callbacks import SearchCallbacks, Trial
    from .options import SearchOptions
    from .study import AnotherFinishes, find_profile, run_search

__all__ = [
    "AnotherFinishes",
    "Prompts",
    "SearchCallbacks",
    "SearchOptions",
    "Trial",
    "find_profile",
    "read_prompts",
    "run_search",
]

_WHERE = {
    **dict.fromkeys(("Prompts", "read_prompts"), "selfspec.text.prompt_files"),
    **dict.fromkeys(("AnotherFinishes", "find_profile", "run_search"), "selfspec.search.study"),
    **dict.fromkeys(("Trial", "SearchCallbacks"), "selfspec.search.callbacks"),
    "SearchOptions": "selfspec.search.options",
}


def __getattr__(name: str) -> Any:
    """Import the module that defines `name` on first use, so that importing this package does not import torch."""
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'selfspec.search' has no attribute '{name}'")
