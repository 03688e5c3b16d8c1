"""Conversion of a chat request's messages to the roles and texts that a chat template takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selfspec.server.errors import wrong
from selfspec.text.prompt import Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_READ = ("role", "content", "name")  # a name is accepted, but not passed to the template
_NOTHING: tuple[Any, ...] = (None, [], "", {})


def read_messages(messages: list[Any]) -> list[Message]:
    """Return the messages, the parts of each content joined. Raises `ApiError`, which names the wrong message."""
    if not messages:
        raise wrong("messages: the list is empty; expected at least one message of the user", "messages")
    return [_message(entry, f"messages[{number}]") for number, entry in enumerate(messages)]


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, Mapping):
        raise wrong(f"{where}: expected an object with role and content", where)
    role = entry.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role: expected one of {', '.join(_ROLES)}", f"{where}.role")
    for name, value in entry.items():
        if name not in _READ and value not in _NOTHING:
            raise wrong(f"{where}.{name[:60]}: is not served", f"{where}.{name[:60]}")
    return {"role": _ROLES[role], "content": _content(entry.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise wrong(f"{where}: expected a text, or parts of type 'text'", where)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise wrong(f"{where}: expected parts of type 'text', each with a text; other types are not served", where)
    return "".join(part["text"] for part in content)
