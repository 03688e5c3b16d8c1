"""Control characters as visible signs, so that no terminal or log acts on those in a text, path or key."""

from __future__ import annotations

import logging

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
