"""Actionable errors in one line, control characters as visible signs, and switches in environment variables."""

from __future__ import annotations

import logging
import os
import reprlib

_BOUNDED = reprlib.Repr()
_BOUNDED.maxlevel, _BOUNDED.maxstring, _BOUNDED.maxother = 3, 60, 60


class SelfspecError(ValueError):
    """Error for unusable input. The command line prints the message and exits with code 2."""


class UnsupportedModelError(SelfspecError):
    """Error for a model type that the runtime does not support; the message names it and the supported types."""


class BusyError(SelfspecError):
    """Error for a second stream on a runtime whose first stream has not ended."""


def check_registered(what: str, new: type, registered: type | None) -> None:
    """Raise `SelfspecError` if a name is registered for another class; `registered`: the class that has the name.

    `what`: the name, and what it names. A class may be registered again, as in a re-run notebook.
    """
    if registered is None or (registered.__module__, registered.__qualname__) == (new.__module__, new.__qualname__):
        return
    raise SelfspecError(f"{what}: it is {registered.__module__}.{registered.__qualname__}; expected another name")


def one_line(value: object) -> str:
    """Return a value's text on one line."""
    return " ".join(str(value).split())


def short(value: object) -> str:
    """Return a value's representation, cut to one line of at most 60 characters."""
    try:
        text = one_line(_BOUNDED.repr(value))  # YAML aliases can nest a small file's value endlessly
    except ValueError:
        return "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def reason(error: Exception) -> str:
    """Return the first sentence of an error's message on one line, at most 300 characters.

    The error's type is put before the message of a `KeyError`, and before a message of fewer than 20 characters.
    `transformers`' message on weights of mismatched sizes is replaced by a short one.
    """
    text = " ".join(str(error).split())
    if "ignore_mismatched_sizes" in text:
        return "config.json does not fit the weights"
    if isinstance(error, KeyError) or len(text) < 20:
        text = f"{type(error).__name__} {text}".strip()
    return text.split(". ")[0][:300]


_LONGEST = 2000  # most characters of a log message
_REPLACED = 0xFFFD
# Newlines and tabs stay. Overrides and isolates of the direction of writing show a text in another order.
_SIGNS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), _REPLACED),
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), _REPLACED),
}


def as_signs(text: str) -> str:
    """Return the text with a visible sign for each control character except newlines and tabs."""
    return text if text.isprintable() else text.translate(_SIGNS)


class SignFilter(logging.Filter):
    """Makes each message of a logger one line, without control characters, of at most 2,000 characters."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the record's message; keep the record."""
        message = as_signs(" ".join(record.getMessage().split()))
        record.msg = message if len(message) <= _LONGEST else message[: _LONGEST - 3] + "..."
        record.args = None
        return True


_VALUES = {**dict.fromkeys(("1", "on", "true", "yes"), True), **dict.fromkeys(("0", "off", "false", "no"), False)}


def switched(variable: str) -> bool | None:
    """Return whether an environment variable turns something on (1, on, true, yes) or off (0, ..); else None."""
    return _VALUES.get(os.environ.get(variable, "").strip().lower())
