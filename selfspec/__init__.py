"""selfspec: lossless self-speculative decoding for LLaMA-family models."""

from __future__ import annotations

from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from selfspec.errors import BusyError, SelfspecError, UnsupportedModelError
from selfspec.skip import SkipSet

if TYPE_CHECKING:
    from selfspec.api import LLM, load, wrap
    from selfspec.loading import DeviceMap
    from selfspec.profile import Profile
    from selfspec.stream import Generation, Stream

__version__ = _version("selfspec")
__all__ = [
    "LLM",
    "BusyError",
    "DeviceMap",
    "Generation",
    "Profile",
    "SelfspecError",
    "SkipSet",
    "Stream",
    "UnsupportedModelError",
    "load",
    "wrap",
]

_LAZY = {
    **dict.fromkeys(("LLM", "load", "wrap"), "selfspec.api"),
    **dict.fromkeys(("Generation", "Stream"), "selfspec.stream"),
    "DeviceMap": "selfspec.loading",
    "Profile": "selfspec.profile",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when they are needed."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'selfspec' has no attribute '{name}'")
