"""Actionable errors: one line that says what is wrong, where, and what is expected."""

from __future__ import annotations

import reprlib

_BOUNDED = reprlib.Repr()
_BOUNDED.maxlevel, _BOUNDED.maxstring, _BOUNDED.maxother = 3, 60, 60


class SelfspecError(ValueError):
    """Error for unusable input. The command line prints the message and exits with code 2."""


class UnsupportedModelError(SelfspecError):
    """Error for a model type that the runtime does not support; the message names it and the supported types."""


class BusyError(SelfspecError):
    """Error for a second stream on a runtime whose first stream has not ended."""


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
