"""Errors that a person can act on: one line that says what is wrong, where, and what would be right."""

from __future__ import annotations

import reprlib

_BOUNDED = reprlib.Repr()
_BOUNDED.maxlevel, _BOUNDED.maxstring, _BOUNDED.maxother = 3, 60, 60


class SelfspecError(ValueError):
    """Something the caller gave cannot be used. The command line prints the message and exits with code 2."""


class UnsupportedModelError(SelfspecError):
    """The model is of a kind that the runtime does not serve; the message names it, and what is served."""


class BusyError(SelfspecError):
    """A second stream was started on a runtime whose first stream has not ended."""


def one_line(value: object) -> str:
    """A value's text on one line."""
    return " ".join(str(value).split())


def short(value: object) -> str:
    """What was given, on one short line, however large or deep it is."""
    try:
        text = one_line(_BOUNDED.repr(value))  # aliases can make a small file's value endless
    except ValueError:
        return "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def reason(error: Exception) -> str:
    """The first sentence of an error, on one line."""
    text = " ".join(str(error).split())
    if "ignore_mismatched_sizes" in text:
        return "config.json does not fit the weights"
    if isinstance(error, KeyError) or len(text) < 20:
        text = f"{type(error).__name__} {text}".strip()
    return text.split(". ")[0][:300]
