"""The search: which sub-layers of a model, on this machine, to bypass. From Python: `find_profile`, `read_prompts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfspec.text.prompt_files import Prompts, read_prompts

    from .prepare import Trial, Watch
    from .study import AnotherFinishes, find_profile

__all__ = ["AnotherFinishes", "Prompts", "Trial", "Watch", "find_profile", "read_prompts"]


def __getattr__(name: str) -> Any:
    """Import torch and the model code only when a search is run."""
    if name in ("Prompts", "read_prompts"):
        from selfspec.text import prompt_files

        return getattr(prompt_files, name)
    if name in __all__:
        from . import prepare, study

        return getattr(prepare if name in ("Trial", "Watch") else study, name)
    raise AttributeError(f"module 'selfspec.search' has no attribute '{name}'")
