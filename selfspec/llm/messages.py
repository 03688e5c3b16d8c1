"""Chat messages, and their encoding to token ids by a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.basics.errors import SelfspecError, reason, short
from selfspec.text.prompt import Message, is_unicode

ROLES = ("system", "user", "assistant")


def message(role: str, content: object) -> dict[str, str]:
    """Build a chat message. Raises `SelfspecError` for content that is not text, and for an empty user message."""
    if not isinstance(content, str):
        raise SelfspecError(f"a chat message is a text; got {type(content).__name__}")
    if not is_unicode(content):
        raise SelfspecError(f"the {role}'s message is not valid Unicode text; give UTF-8")
    return {"role": role, "content": content}


def validate_messages(messages: object) -> list[dict[str, str]]:
    """Return chat messages as dicts, after checking their roles and contents.

    Raises `SelfspecError`, which gives the number of the wrong message.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise SelfspecError(
            f"messages: expected a list of {{'role': ..., 'content': ...}}; got {type(messages).__name__}"
        )
    if not messages:
        raise SelfspecError("messages: the list is empty; expected at least one message of the user")
    return [_checked(entry, f"message {number}") for number, entry in enumerate(messages, 1)]


def _checked(entry: object, where: str) -> dict[str, str]:
    if not isinstance(entry, Mapping):
        raise SelfspecError(f"{where}: expected {{'role': ..., 'content': ...}}; got {short(entry)}")
    for name in ("role", "content"):
        if name not in entry:
            raise SelfspecError(f"{where} has no {name}; expected {{'role': ..., 'content': ...}}")
    unknown = next((name for name in entry if name not in ("role", "content")), None)
    if unknown is not None:
        raise SelfspecError(f"{where}: {short(unknown)} is not known; expected role and content, and nothing else")
    if entry["role"] not in ROLES:
        raise SelfspecError(f"{where}: role {short(entry['role'])} is not known; known: {', '.join(ROLES)}")
    try:
        return message(entry["role"], entry["content"])
    except SelfspecError as error:
        raise SelfspecError(f"{where}: {error}") from None


def render(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of messages and of the answer's header, as the tokenizer's chat template formats them.

    Only the template adds special tokens: tokenising the rendered text would add a second BOS token.
    Raises `SelfspecError` if there is no template, and if the template fails.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise SelfspecError("the tokenizer has no chat template; do without chat, or take a model that has one")
    try:
        ids = tokenizer.apply_chat_template(
            [dict(entry) for entry in messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template can raise anything
        raise SelfspecError(f"the tokenizer's chat template fails: {reason(error)}") from None
    return list(ids)


def check_system(tokenizer: Any) -> None:
    """Raise `SelfspecError` if the chat template fails on a system message, or silently leaves it out."""
    user = message("user", "x")
    first, second = (render(tokenizer, [message("system", text), user]) for text in ("one", "other"))
    if first == second:
        raise SelfspecError("the tokenizer's chat template leaves system messages out; do without one")
