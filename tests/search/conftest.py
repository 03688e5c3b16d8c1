"""A quicker model, and fixed costs: searches are the same whatever the layers and the machine."""

from __future__ import annotations

import pytest
from fake_costs import costs_are_fixed as costs_are_fixed

import selfspec
from selfspec.training.distill import keep_layers

LAYERS = 6


def quick(dtype: str) -> selfspec.LLM:
    """The built-in model with some of its layers alone, without a profile."""
    model = selfspec.load("builtin", profile="none", dtype=dtype)
    return selfspec.wrap(keep_layers(model.model, LAYERS), model.tokenizer, profile="none")


@pytest.fixture(scope="session")
def whole() -> selfspec.LLM:
    """The built-in model in float32, with all of its layers."""
    return selfspec.load("builtin", profile="none")


@pytest.fixture(scope="session")
def llm() -> selfspec.LLM:
    """Some layers of the built-in model, in float32."""
    return quick("float32")


@pytest.fixture(scope="session")
def llm64() -> selfspec.LLM:
    """Some layers of the built-in model, in float64."""
    return quick("float64")
