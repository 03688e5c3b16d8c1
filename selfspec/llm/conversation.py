"""Conversations: chat messages whose KV cache is reused from answer to answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from selfspec.engine.engine import OnPrefill
from selfspec.llm.messages import check_system, message, render
from selfspec.llm.options import GenerateOptions, Options, options_method
from selfspec.llm.sampling_plan import Plan
from selfspec.llm.stream import Generation, Stream
from selfspec.speculation.drafter import Drafter


class ChatModel(Protocol):
    """The attributes and methods of `LLM` that a conversation uses."""

    tokenizer: Any

    @property
    def start(self) -> Callable[..., Stream]:
        """The method `LLM.start`."""


def _send(conversation: Conversation, text: str, options: GenerateOptions) -> Generation:
    """Send `text` as the user's message and return the answer that `LLM.chat` gives to all messages.

    The message and the answer are then appended to `messages`. An interrupted answer (Ctrl-C, an error) is appended as
    far as it was generated; an interruption or error before the first token leaves the conversation unchanged. Takes
    the options of `LLM.chat`. Raises `SelfspecError` as `LLM.chat` does, also when the conversation exceeds the context
    length.
    """
    return conversation.run(text, options, drafter=options.drafter)


def _stream(conversation: Conversation, text: str, options: GenerateOptions) -> Stream:
    """Send `text` as `send` does, but return at once a stream that yields the pieces of the answer.

    The message and the answer are appended to `messages` when the stream ends for any reason, unless the conversation
    has continued or was reset in the meantime.
    """
    return conversation.start(text, options, drafter=options.drafter)


class Conversation:
    """Chat with the message history kept here and in the model's KV cache; made by `LLM.conversation`.

    Each answer prefills only the part of its prompt that follows the longest cached prefix. Any other use of the model
    in between empties the cache, except another conversation, which keeps the prefix that both share. After the cache
    has been emptied, and always with a drafter that reads the prompt's hidden states, an answer prefills its whole
    prompt. Reuse does not change the answers, except where two tokens have nearly equal logits in a dtype below
    float64: passes over different numbers of tokens round differently. The model's weights must not change; after a
    change, one `generate` call empties the cache.

    `system`: the system message (None: no system message). Raises `SelfspecError` if the tokenizer has no chat
    template, or if a system message is given and the template takes none.
    """

    def __init__(self, llm: ChatModel, *, system: str | None = None) -> None:
        self._llm = llm
        self._system = [] if system is None else [message("system", system)]
        if system is not None:
            check_system(llm.tokenizer)
        render(llm.tokenizer, [*self._system, message("user", "x")])  # raise now if there is no template
        self._messages = list(self._system)

    send = options_method(GenerateOptions, _send)
    stream = options_method(GenerateOptions, _stream)

    @property
    def messages(self) -> list[dict[str, str]]:
        """A copy of all messages, the system's first: `{"role": ..., "content": ...}`."""
        return [dict(entry) for entry in self._messages]

    @property
    def answers(self) -> int:
        """The number of answers so far."""
        return sum(entry["role"] == "assistant" for entry in self._messages)

    def reset(self) -> None:
        """Delete all messages but the system's."""
        self._messages = list(self._system)

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of the prompt for `text` as the next message. Raises `SelfspecError`."""
        return render(self._llm.tokenizer, self._with(text))

    def run(self, text: str, options: Options, *, drafter: Drafter | None = None) -> Generation:
        """Return the answer to `text` as `send` does, with the decoding options in one object."""
        return self.start(text, options, drafter=drafter, pieces=False).wait()

    def start(
        self,
        text: str,
        options: Options,
        *,
        planned: Plan | None = None,
        drafter: Drafter | None = None,
        pieces: bool = True,
        on_prefill: OnPrefill | None = None,
    ) -> Stream:
        """Return a stream of the answer to `text` as `stream` does, with the decoding options in one object.

        The other arguments are those of `LLM.start`.
        """
        before, prompt_messages = self._messages, self._with(text)

        def ended(answer: str) -> None:
            if self._messages is before:
                self._messages = [*prompt_messages, message("assistant", answer)]

        return self._llm.start(
            render(self._llm.tokenizer, prompt_messages),
            options,
            planned=planned,
            drafter=drafter,
            pieces=pieces,
            reuse=True,
            ended=ended,
            on_prefill=on_prefill,
        )

    def _with(self, text: str) -> list[dict[str, str]]:
        return [*self._messages, message("user", text)]
