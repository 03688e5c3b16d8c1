from __future__ import annotations

import pytest
from batches import ToyBatch
from chats import with_template
from servers import served

import selfspec


@pytest.fixture(scope="session")
def chatting(llm) -> selfspec.LLM:
    """The built-in model with a chat template."""
    return with_template(llm)


@pytest.fixture(scope="module")
def toy(chatting):
    """A server of four rows that continues each prompt with itself, backwards."""
    with served(chatting, ToyBatch(chatting, rows=4)) as one:
        yield one
