"""What a prompt may be."""

from __future__ import annotations

from collections.abc import Sequence

Prompt = str | Sequence[int]  # text or token ids


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded at all: not with half a surrogate pair, or bytes that were no text."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
