"""Fixtures for tests of rounds on the device, which the fake capture runs on a CPU."""

from __future__ import annotations

import pytest
from models import small

VOCABULARY = 11


@pytest.fixture(autouse=True)
def switched_on(monkeypatch) -> None:
    """Rounds on the device, which a CPU has only if asked for."""
    monkeypatch.setenv("SELFSPEC_DEVICE_ROUND", "1")


@pytest.fixture(scope="module")
def model() -> object:
    """The model of these tests."""
    return small(VOCABULARY, seed=2)
