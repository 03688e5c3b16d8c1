"""No terminal and no log acts on the control characters of a text, a path or a key."""

from __future__ import annotations

import logging

import pytest

import selfspec
from selfspec.basics.errors import as_signs, switched


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc d", "a\tb\nc d"),
        ("\x1b[31m\x00\r\x7f", "␛[31m␀␍␡"),
        ("a\x9bb\x80", "a\ufffdb\ufffd"),
        ("a\u202eb\u2066c\u2069", "a\ufffdb\ufffdc\ufffd"),
        ("né 日本 👩\u200d💻 \u200f", "né 日本 👩\u200d💻 \u200f"),
    ],
)
def test_signs(text, shown):
    assert as_signs(text) == shown
    assert as_signs(shown) == shown


def test_a_log_message_is_one_line_of_signs(caplog):
    assert selfspec.__name__ == "selfspec"
    logging.getLogger("selfspec").warning("%s: cannot be read\nERROR forged", "a\x9b\u202e.answers")
    logging.getLogger("selfspec").warning("x" * 70_000)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["a\ufffd\ufffd.answers: cannot be read ERROR forged", "x" * 1997 + "..."]


@pytest.mark.parametrize(
    ("value", "on"),
    [("1", True), (" Yes", True), ("on", True), ("0", False), ("OFF", False), ("no", False), ("", None), ("2", None)],
)
def test_a_value_turns_on_or_off_or_says_nothing(monkeypatch, value, on):
    monkeypatch.setenv("SELFSPEC_SOMETHING", value)
    assert switched("SELFSPEC_SOMETHING") is on
    monkeypatch.delenv("SELFSPEC_SOMETHING")
    assert switched("SELFSPEC_SOMETHING") is None
