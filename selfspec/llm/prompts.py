"""Prompts as a model is given them: token ids, of a chat message where that is asked for, cut to the context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from selfspec.basics.errors import SelfspecError, reason
from selfspec.model.loading import load_tokenizer
from selfspec.text.prompt import Prompt

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM


def encode(llm: LLM, prompt: Prompt, *, chat: bool = False) -> list[int]:
    """The token ids of a prompt; with `chat`, of a text as a user's message. Raises `SelfspecError`."""
    return llm.encode(_message(llm.tokenizer, prompt) if chat else prompt)


def fit(ids: list[int], room: int, *, framed: bool) -> list[int]:
    """At most `room` of the token ids: the first ones, or where a frame stands around the text, its middle left out."""
    if len(ids) <= room or not framed:
        return ids[:room]
    end = room // 2
    return ids[: room - end] + ids[len(ids) - end :]


def takes_messages(llm: LLM) -> bool:
    """Whether the model's tokenizer has a chat template, one that does not fail on a user's message."""
    try:
        return bool(encode(llm, "x", chat=True))
    except SelfspecError:
        return False


def fitting(llm: LLM, prompt: Prompt, max_new_tokens: int, *, chat: bool = False, framed: bool = False) -> Prompt:
    """The prompt as it is where the new tokens fit after it, else `encode` and `fit` to what they leave of the context.

    Raises `SelfspecError` where that is nothing.
    """
    ids = encode(llm, prompt, chat=chat)
    room = llm.runtime.skeleton.context - max_new_tokens
    if not chat and len(ids) <= room:
        return prompt
    return llm.check(fit(ids, room, framed=framed or chat) if room > 0 else ids, max_new_tokens)


def check_chat(model: str) -> None:
    """Raise `SelfspecError` when the tokenizer of a model by name has no chat template, without loading the model."""
    try:
        _message(load_tokenizer(model), "x")
    except SelfspecError as error:
        raise SelfspecError(f"model {model}: {error}") from None


def _message(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a user's message up to where the answer begins, by the tokenizer's chat template.

    Special tokens are the template's alone: encoded as text, the message would begin with a second BOS token.
    """
    if not isinstance(prompt, str):
        raise SelfspecError("a chat message is a text; got token ids")
    if not getattr(tokenizer, "chat_template", None):
        raise SelfspecError("its tokenizer has no chat template; do without chat, or take a model made for it")
    message = [{"role": "user", "content": prompt}]
    try:
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # a template can raise anything
        raise SelfspecError(f"its tokenizer's chat template fails: {reason(error)}") from None
    return list(ids)
