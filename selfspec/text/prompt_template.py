"""Conversion of data rows to prompts: the text of one column, or a template over several."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, cast

from selfspec.basics.errors import SelfspecError
from selfspec.text.prompt import Message, Prompt, is_chat, is_unicode

DEFAULT_COLUMNS = ("prompt", "text", "messages")  # without a named column, the first of these that exists is read


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    r"""The column, or the template over several columns, that makes a prompt of a row.

    `column`: the column to read; by default the first of `DEFAULT_COLUMNS` that the row has. `template`: a text with
    columns in braces, such as `"Question: {question}\nAnswer:"`, where `{{` and `}}` stand for braces. If both are
    given, the template must name the column. If a column holds a list of texts, such as a conversation's turns, the
    first text is read; if it holds a list of messages, `{"role": ..., "content": ...}`, the user's first message is
    read. With `chat` and without a template, the whole list of messages is the prompt.
    Raises `SelfspecError` for an invalid template.
    """

    column: str | None = None
    template: str | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        if self.column == "":
            raise SelfspecError("the column's name is empty")
        if self.template is None:
            return
        if not is_unicode(self.template):
            raise SelfspecError("the template is not valid Unicode text; give UTF-8")
        names = _names(self.template)
        if not names:
            raise SelfspecError(
                f"template {self.template!r}: names no column; expected one in braces, such as {{text}}"
            )
        if self.column is not None and self.column not in names:
            raise SelfspecError(
                f"template {self.template!r}: does not name the column '{self.column}' that was asked for"
            )

    def columns(self, available: Collection[str]) -> tuple[str, ...]:
        """Return the columns to read, given the existing ones. Raises `SelfspecError` for a missing column."""
        defaults = tuple(name for name in DEFAULT_COLUMNS if name in available)[:1]
        selected = defaults if self.template is None and self.column is None else self._columns({})
        missing = [name for name in selected if name not in available]
        if missing or not selected:
            *most, last = (f"'{name}'" for name in missing[:1] or DEFAULT_COLUMNS)
            named = " or ".join(filter(None, (", ".join(most), last)))
            raise SelfspecError(f"no column {named} (there are: {', '.join(list(available)[:20])}); name another")
        return selected

    def prompt(self, row: Mapping[str, Any]) -> Prompt | None:
        """Return the prompt of a row; None if a text is missing, empty or of another type."""
        if self.chat and self.template is None and is_chat(value := row.get(self._columns(row)[0])):
            return cast("list[Message]", value)
        return self.text(row)

    def text(self, row: Mapping[str, Any]) -> str | None:
        """Return the text of a row's prompt; None if a text is missing, empty or of another type."""
        texts = {name: _text(row.get(name), numbers=self.template is not None) for name in self._columns(row)}
        if None in texts.values():
            return None
        if self.template is None:
            return next(iter(texts.values()))
        parts = Formatter().parse(self.template)
        return "".join(before + (texts[name] or "" if name is not None else "") for before, name, *_ in parts)

    def __str__(self) -> str:
        """Return the condition on rows for an error that reads "a row whose ..."."""
        if self.template is not None:
            named = " and ".join(f"'{name}'" for name in self._columns({}))
            return f"{named} are texts that are not empty, or numbers"
        named = "'prompt' (or 'text')" if self.column is None else f"'{self.column}'"
        return f"{named} is a text that is not empty"

    def _columns(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        if self.template is not None:
            return _names(self.template)
        return (self.column or next((name for name in DEFAULT_COLUMNS if name in row), DEFAULT_COLUMNS[0]),)


def _names(template: str) -> tuple[str, ...]:
    """Return a template's column names, each once. Raises `SelfspecError` for anything but a name inside braces."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise SelfspecError(f"template {template!r}: {error}; {{{{ and }}}} stand for braces") from None
    names = dict.fromkeys(name for _, name, *_ in parts if name is not None)
    for _, name, details, conversion in parts:
        if name is not None and (not name or details or conversion or set(name) & set(".[]{}")):
            raise SelfspecError(
                f"template {template!r}: expected nothing but the name of a column in braces, such as {{text}}"
            )
    return tuple(names)


def _text(value: Any, *, numbers: bool) -> str | None:
    if is_chat(value):
        value = next(
            (
                message.get("content")
                for message in value
                if isinstance(message, Mapping) and message.get("role") == "user"
            ),
            None,
        )
    elif isinstance(value, list) and value:
        value = value[0]
    if numbers and isinstance(value, (int, float)):
        return str(value)
    return value if isinstance(value, str) and value.strip() else None
