"""The prompts that come with selfspec, as scripts measure on them: chats for a model that takes such, else Python."""

from __future__ import annotations

from selfspec import builtin
from selfspec.llm.llm import LLM
from selfspec.llm.prompt_encoding import encode, takes_messages
from selfspec.text.prompt_files import prompts_for


def prompts(llm: LLM, part: builtin.Part, count: int) -> list[list[int]]:
    """The first `count` of them, as token ids."""
    found = prompts_for(None, part, chat=False, takes_messages=takes_messages(llm))
    return [encode(llm, text, chat=found.messages) for text in found.texts[:count]]
