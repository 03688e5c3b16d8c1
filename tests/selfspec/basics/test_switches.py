"""Environment variables that turn something on or off."""

from __future__ import annotations

import pytest

from selfspec.basics.switches import switched


@pytest.mark.parametrize(
    ("value", "on"),
    [("1", True), (" Yes", True), ("on", True), ("0", False), ("OFF", False), ("no", False), ("", None), ("2", None)],
)
def test_a_value_turns_on_or_off_or_says_nothing(monkeypatch, value, on):
    monkeypatch.setenv("SELFSPEC_SOMETHING", value)
    assert switched("SELFSPEC_SOMETHING") is on
    monkeypatch.delenv("SELFSPEC_SOMETHING")
    assert switched("SELFSPEC_SOMETHING") is None
