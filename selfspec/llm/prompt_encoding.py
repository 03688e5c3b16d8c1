"""Encoding of prompts to token ids, as chat messages if requested, cut to the context length."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from selfspec.basics.errors import SelfspecError
from selfspec.llm.messages import check_system, message, render
from selfspec.models.loading import load_tokenizer
from selfspec.text.prompt_template import Message, Prompt, is_chat

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM


def encode(llm: LLM, prompt: Prompt, *, chat: bool = False, system: str | None = None) -> list[int]:
    """Return a prompt's token ids; with `chat`, a text becomes a user's message, after a `system` message if given.

    A list of chat messages that begins with a system message keeps it. Raises `SelfspecError` for messages if the
    tokenizer has no chat template.
    """
    if not chat:
        return llm.encode(prompt)
    messages = cast("list[Message]", [*prompt] if is_chat(prompt) else [message("user", prompt)])
    if system is not None and messages[0].get("role") != "system":
        messages.insert(0, message("system", system))
    return llm.encode(messages)


def fit(ids: list[int], max_tokens: int, *, framed: bool) -> list[int]:
    """Cut token ids to at most `max_tokens` by dropping tokens at the end, or with `framed` in the middle.

    `framed`: a template surrounds the text, so that both ends must be kept.
    """
    if len(ids) <= max_tokens or not framed:
        return ids[:max_tokens]
    end = max_tokens // 2
    return ids[: max_tokens - end] + ids[len(ids) - end :]


def warn_if_cut(lengths: Iterable[int], max_tokens: int) -> None:
    """Warn if prompts of these lengths, in tokens, are cut to `max_tokens`."""
    cut = [length for length in lengths if length > max_tokens]
    if cut:
        many = "1 prompt is" if len(cut) == 1 else f"{len(cut)} prompts are"
        longest = f"{max(cut)} tokens" if len(cut) == 1 else f"up to {max(cut)} tokens"
        warnings.warn(
            f"{many} cut: {longest}, but only {max_tokens} fit the context together with the new tokens", stacklevel=3
        )


def takes_messages(llm: LLM) -> bool:
    """Return whether the model's tokenizer has a chat template that accepts a user's message."""
    try:
        return bool(encode(llm, "x", chat=True))
    except SelfspecError:
        return False


def fit_prompt(llm: LLM, prompt: Prompt, max_new_tokens: int, *, chat: bool = False, framed: bool = False) -> Prompt:
    """Return the prompt unchanged if it and the new tokens fit the context, else its token ids cut by `fit`.

    `chat`: encode the prompt as a user's message, and always return token ids. `framed` is that of `fit`. Raises
    `SelfspecError` if the new tokens leave no room for the prompt.
    """
    ids = encode(llm, prompt, chat=chat)
    max_prompt_tokens = llm.runtime.skeleton.context - max_new_tokens
    if not chat and len(ids) <= max_prompt_tokens:
        return prompt
    return llm.check(
        fit(ids, max_prompt_tokens, framed=framed or chat) if max_prompt_tokens > 0 else ids, max_new_tokens
    )


def check_chat(model: str, *, system: bool = False) -> None:
    """Raise `SelfspecError` if the tokenizer of the named model has no chat template, without loading the model.

    With `system`, also if the template does not accept a system message.
    """
    tokenizer = load_tokenizer(model)
    try:
        render(tokenizer, [message("user", "x")])
        if system:
            check_system(tokenizer)
    except SelfspecError as error:
        raise SelfspecError(f"model {model}: {error}") from None
