"""Prompts as a model is given them: token ids, of a chat message where that is asked for, cut to the context."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from selfspec.basics.errors import SelfspecError
from selfspec.llm.messages import check_system, message, render
from selfspec.models.loading import load_tokenizer
from selfspec.text.prompt import Prompt, is_chat

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM


def encode(llm: LLM, prompt: Prompt, *, chat: bool = False, system: str | None = None) -> list[int]:
    """The token ids of a prompt; with `chat`, of a text as a user's message, perhaps after a `system` message.

    Messages of a chat are one as they are.

    Raises `SelfspecError`.
    """
    if not chat or is_chat(prompt):
        return llm.encode(prompt)
    before = [] if system is None else [message("system", system)]
    return llm.encode([*before, message("user", prompt)])


def fit(ids: list[int], room: int, *, framed: bool) -> list[int]:
    """At most `room` of the token ids: the first ones, or where a frame stands around the text, its middle left out."""
    if len(ids) <= room or not framed:
        return ids[:room]
    end = room // 2
    return ids[: room - end] + ids[len(ids) - end :]


def warn_of_cuts(lengths: Iterable[int], room: int) -> None:
    """Warn where prompts of these lengths, in tokens, are cut to `room`."""
    cut = [length for length in lengths if length > room]
    if cut:
        many = "1 prompt is" if len(cut) == 1 else f"{len(cut)} prompts are"
        longest = f"{max(cut)} tokens" if len(cut) == 1 else f"up to {max(cut)} tokens"
        warnings.warn(f"{many} cut: of {longest}, where the context leaves {room} beside the new ones", stacklevel=3)


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


def check_chat(model: str, *, system: bool = False) -> None:
    """Raise `SelfspecError` when the tokenizer of a model by name has no chat template, without loading the model.

    With `system` also when its template does not take a system message.
    """
    tokenizer = load_tokenizer(model)
    try:
        render(tokenizer, [message("user", "x")])
        if system:
            check_system(tokenizer)
    except SelfspecError as error:
        raise SelfspecError(f"model {model}: {error}") from None
