"""The whitespace of a JSON text: what stands between its parts, as its own beginning shows it."""

from __future__ import annotations

import re

_PART = re.compile(rb'"(?:[^"\\]|\\.)*("?)|([{}\[\],:])([ \t\r\n]*)', re.DOTALL)
_SPACES = b" \t\r\n"


def next_whitespace(text: bytes, following: bytes) -> bytes | None:
    """Return the whitespace that is likely to complete the JSON text `text` before its next byte `following`.

    The text so far shows its layout: what followed the latest `{`, `[`, `:` and `,`, with an indentation that grows
    with the depth. Return None within a string, and where the text has shown nothing yet.
    """
    containers: list[bytes] = []
    shown: dict[bytes, tuple[bytes, int]] = {}  # latest whitespace after each key of `_key`, and its depth
    after = b""  # the last structural character but a closing one, if nothing but whitespace follows it
    for part in _PART.finditer(text):
        mark, spaces = part[2], part[3]
        if mark is None:
            if not part[1]:
                return None
            after = b""
            continue
        if mark in b"{[":
            containers.append(mark)
        elif mark in b"}]" and containers:
            containers.pop()
        ended = part.end() == len(text)
        after = mark if ended and mark not in b"}]" else b""
        if not ended and text[part.end() : part.end() + 1] not in (b"}", b"]"):  # an empty container shows nothing
            shown[_key(mark, containers)] = spaces, len(containers)
    present = text[len(text.rstrip(_SPACES)) :]
    likely = _likely(after, following, containers, shown)
    if likely is None:
        return None
    return likely[len(present) :] if likely.startswith(present) else b""


def _key(mark: bytes, containers: list[bytes]) -> bytes:
    """Return the character with its container for a comma, and the character alone for all others."""
    return mark + containers[-1] if mark == b"," and containers else mark


def _likely(
    after: bytes, following: bytes, containers: list[bytes], shown: dict[bytes, tuple[bytes, int]]
) -> bytes | None:
    """Return the likely whitespace between the character `after` (b"": the end of a value) and `following`."""
    opener = containers[-1] if containers else b""
    depth = len(containers)
    if following in b"}]":
        spaces, before = shown.get(opener, (b"", 0))
        return _indented(spaces, before, depth - 1) if spaces.startswith(b"\n") and not after else b""
    if following in b",:" or not after:
        return b""
    if after == b":":
        return shown.get(after, (b" ", 0))[0]
    found = shown.get(_key(after, containers))
    if found is None and after == b",":
        found = shown.get(opener)
        found = found if found is not None and found[0].startswith(b"\n") else (b" ", 0)
    return None if found is None else _indented(*found, depth)


def _indented(spaces: bytes, before: int, depth: int) -> bytes:
    """Return whitespace that was seen at depth `before`, with the indentation of a line at `depth`."""
    if not spaces.startswith(b"\n") or before < 1:
        return spaces
    unit, rest = divmod(len(spaces) - 1, before)
    return spaces if rest else b"\n" + spaces[1 : 1 + unit] * depth
