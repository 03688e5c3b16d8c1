"""selfspec: lossless self-speculative decoding for LLaMA-family models."""

from __future__ import annotations

from importlib.metadata import version as _version
from logging import getLogger as _getLogger
from typing import TYPE_CHECKING, Any

from selfspec.basics.errors import BusyError, SelfspecError, UnsupportedModelError
from selfspec.basics.errors import SignFilter as _SignFilter
from selfspec.types.draft_path import DraftPath, SkipSet

if TYPE_CHECKING:
    from selfspec.integrations.custom_generate import hf
    from selfspec.llm.conversation import Conversation
    from selfspec.llm.llm import LLM, load, wrap
    from selfspec.llm.stream import Generation, Stream
    from selfspec.models.loading import DeviceMap
    from selfspec.profile.schema import Profile

_getLogger("selfspec").addFilter(_SignFilter())
__version__ = _version("selfspec")
__all__ = [
    "LLM",
    "BusyError",
    "Conversation",
    "DeviceMap",
    "DraftPath",
    "Generation",
    "Profile",
    "SelfspecError",
    "SkipSet",
    "Stream",
    "UnsupportedModelError",
    "hf",
    "load",
    "wrap",
]

_LAZY = {
    **dict.fromkeys(("LLM", "load", "wrap"), "selfspec.llm.llm"),
    **dict.fromkeys(("Generation", "Stream"), "selfspec.llm.stream"),
    "Conversation": "selfspec.llm.conversation",
    "DeviceMap": "selfspec.models.loading",
    "hf": "selfspec.integrations.custom_generate",
    "Profile": "selfspec.profile.schema",
}


def __getattr__(name: str) -> Any:
    """Import the public names and the subpackages on first access, so that torch is imported only when needed."""
    from importlib import import_module
    from importlib.util import find_spec

    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'selfspec' has no attribute '{name}'")
