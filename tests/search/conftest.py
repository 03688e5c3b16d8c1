"""A quicker model: searches, and what they are held against, are the same whatever the layers."""

from __future__ import annotations

import pytest

import selfspec
from selfspec.training.distill import some_layers

LAYERS = 6


@pytest.fixture(scope="session")
def whole() -> selfspec.LLM:
    """The built-in model in float32."""
    return selfspec.load(profile="none")


@pytest.fixture(scope="session")
def llm(whole) -> selfspec.LLM:
    """Some layers of it."""
    return selfspec.wrap(some_layers(whole.model, LAYERS), whole.tokenizer, profile="none")
