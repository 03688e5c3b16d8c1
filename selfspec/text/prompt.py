"""Prompt types: a text, token ids, or chat messages."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.basics.errors import SelfspecError

Message = Mapping[str, str]  # {"role": "system", "user" or "assistant", "content": text}
Prompt = str | Sequence[int] | Sequence[Message]  # a text, token ids, or a chat whose last message is to be answered


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8: it has no unpaired surrogate, as undecodable bytes leave."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def is_chat(prompt: object) -> bool:
    """Return whether a prompt is a list of chat messages."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def shown(prompt: Prompt) -> str:
    """Return a prompt as text to show: each message with its role on a new line, token ids as numbers."""
    if is_chat(prompt):
        return "\n\n".join(f"{entry.get('role')}: {entry.get('content')}" for entry in prompt)  # type: ignore[union-attr]
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


def token_ids(prompt: Any) -> list[int]:
    """Convert a sequence of whole numbers, or a tensor or array `[n]` or `[1, n]`, to a list of token ids.

    Raises `SelfspecError` for anything else.
    """
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, (list, tuple)) and len(ids) == 1 and isinstance(ids[0], (list, tuple)):
        ids = ids[0]
    if not isinstance(ids, Sequence) or isinstance(ids, (bytes, bytearray)) or any(isinstance(i, bool) for i in ids):
        raise SelfspecError(f"a prompt is a text, token ids or messages; got {type(prompt).__name__}")
    try:
        return [operator.index(i) for i in ids]
    except TypeError:
        raise SelfspecError("a prompt's token ids are whole numbers; got something else among them") from None
