"""Errors of the server are one line that is safe to show."""

from __future__ import annotations

from selfspec.server.errors import wrong


def test_a_message_has_no_control_characters():
    """A client prints what a request quoted."""
    assert wrong("the model '\x1b[31m\x00\n' does not exist").message == "the model '␛[31m␀ ' does not exist"
