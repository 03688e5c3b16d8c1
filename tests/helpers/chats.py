"""Chat templates for models that have none."""

from __future__ import annotations

import copy

import selfspec

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}# {{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)


def with_template(llm: selfspec.LLM, template: str = TEMPLATE) -> selfspec.LLM:
    """The same model, with a runtime and a tokenizer of its own that has a chat template."""
    tokenizer = copy.deepcopy(llm.tokenizer)
    tokenizer.chat_template = template
    return selfspec.wrap(llm.model, tokenizer, profile="none", name="chat")


def save_with_template(llm: selfspec.LLM, folder: object, template: str = TEMPLATE) -> None:
    """The same model and tokenizer, with a chat template, in a folder."""
    made = with_template(llm, template)
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
