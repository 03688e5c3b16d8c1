"""Chat messages, and their encoding to token ids by a tokenizer's chat template."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from selfspec.basics.errors import SelfspecError, reason, short
from selfspec.text.prompt_template import Message, is_unicode

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

    Only the template adds special tokens: tokenising the rendered text would add a second BOS token. A special token's
    text in a message is tokenised as any other text, so that no message can end itself or begin another.
    Raises `SelfspecError` if there is no template, and if the template fails.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise SelfspecError(
            "the tokenizer has no chat template; do without chat (in a server: /v1/completions), or take another model"
        )
    special = _special_tokens(tokenizer)
    quoted = any(text in entry["content"] for entry in messages for text in special)
    try:
        if quoted:
            return _render_quoted(tokenizer, messages, special)
        return list(_apply(tokenizer, messages, tokenize=True))
    except Exception as error:  # a template can raise anything
        raise SelfspecError(f"the tokenizer's chat template fails: {reason(error)}") from None


def _apply(tokenizer: Any, messages: Sequence[Message], *, tokenize: bool) -> Any:
    """Apply the chat template; return token ids, or the text if not `tokenize`."""
    return tokenizer.apply_chat_template(
        [dict(entry) for entry in messages], add_generation_prompt=True, tokenize=tokenize, return_dict=False
    )


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Return the special tokens of two or more characters, each an `AddedToken`, by their texts."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {token.content: token for token in added if token.special and len(token.content) > 1}


def _render_quoted(tokenizer: Any, messages: Sequence[Message], special: Mapping[str, Any]) -> list[int]:
    """Return the token ids of messages, some of which contain the texts of special tokens.

    A character that no message contains is put into these texts while the template is applied. What still reads as a
    special token then comes from the template. As the tokenizer does, the text is split there, and the parts are
    tokenised one by one, now without special tokens.
    """
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    used = {char for entry in messages for char in entry["content"]}
    mark = next(char for char in map(chr, range(0xE000, 0xF8FF)) if char not in used)

    def marked(text: str) -> str:
        while pattern.search(text):
            text = pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        return text

    hidden = [{**entry, "content": marked(entry["content"])} for entry in messages]
    rendered = _apply(tokenizer, hidden, tokenize=False)
    encode = _encoder_of_plain_text(tokenizer)
    ids: list[int] = []
    start, strip_next = 0, False
    for match in [*pattern.finditer(rendered), None]:
        part = rendered[start : match.start() if match else None].replace(mark, "")
        token = special[match[0]] if match else None
        part = part.lstrip() if strip_next else part
        part = part.rstrip() if token is not None and token.lstrip else part
        if part:
            ids += encode(part)
        if match and token is not None:
            ids.append(tokenizer.convert_tokens_to_ids(token.content))
            start, strip_next = match.end(), token.rstrip
    return ids


@lru_cache(maxsize=4)
def _encoder_of_plain_text(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return a function that tokenises text without special tokens.

    It uses a copy of the tokenizer: `split_special_tokens` is a setting of the whole tokenizer, which another thread
    could change before the text is read.
    """
    own = copy.deepcopy(tokenizer)
    return lambda text: list(own(text, add_special_tokens=False, split_special_tokens=True).input_ids)


def check_system(tokenizer: Any) -> None:
    """Raise `SelfspecError` if the chat template fails on a system message, or silently leaves it out."""
    user = message("user", "x")
    first, second = (render(tokenizer, [message("system", text), user]) for text in ("one", "other"))
    if first == second:
        raise SelfspecError("the tokenizer's chat template leaves system messages out; do without one")
