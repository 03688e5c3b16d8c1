from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of the processes that tests start: threads wait for each other

import pytest
import torch

import selfspec
from selfspec import builtin

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory) -> None:
    """No test reads or writes the user's cache."""
    os.environ["SELFSPEC_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def llm() -> selfspec.LLM:
    """The built-in model in float32, without a profile."""
    return selfspec.load(profile="none")


@pytest.fixture(scope="session")
def llm64() -> selfspec.LLM:
    """The built-in model in float64, without a profile."""
    return selfspec.load(profile="none", dtype="float64")


@pytest.fixture(scope="session")
def held_out() -> list[str]:
    """The held-out prompts."""
    return builtin.prompts("heldout")
