"""Whitespace as the text so far has it."""

from __future__ import annotations

import pytest

from selfspec.text.guided import next_whitespace


@pytest.mark.parametrize(
    ("text", "following", "whitespace"),
    [
        (b"{", b'"', None),  # nothing was shown yet
        (b'{\n  "a', b'"', None),  # within a string
        (b'{\n  "a\\"', b'"', None),
        (b'{\n  "a"', b":", b""),
        (b'{\n  "a":', b'"', b" "),  # what most write
        (b'{"a":1,"b":', b'"', b""),  # what this one writes
        (b'{"a": 1,', b'"', b" "),
        (b'{\n  "a": 1,', b'"', b"\n  "),  # as after the brace
        (b'{\n  "a": 1,\n', b'"', b"  "),  # the rest of it
        (b'{\n  "a": 1,\t', b'"', b""),  # it went another way
        (b'{\n  "a": {', b'"', b"\n    "),  # deeper
        (b'{\n  "a": {\n    "b": 1', b"}", b"\n  "),
        (b'{\n  "a": {\n    "b": 1\n  }', b"}", b"\n"),
        (b'{"a": {"b": 1', b"}", b""),
        (b'{\n "a": [1,', b'"', b" "),  # a list's comma is not an object's
        (b'{\n "a": [1,2,', b'"', b""),
        (b'{\n  "a": {}', b"}", b"\n"),
        (b'{"a,b: {": 1,', b'"', b" "),  # marks within a string are none
        (b"", b"{", b""),
    ],
)
def test_it_follows_the_text(text, following, whitespace):
    assert next_whitespace(text, following) == whitespace
