"""A conversation: the messages so far, and the next answer, for which only what is new is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from selfspec.llm.messages import check_system, message, render
from selfspec.llm.options import GenerateOptions, Options
from selfspec.llm.signature import takes
from selfspec.llm.stream import Generation, Stream
from selfspec.speculation.drafter import Drafter
from selfspec.text.prompt import Prompt


class Speaker(Protocol):
    """What a conversation asks of an `LLM`."""

    tokenizer: Any

    def start(
        self,
        prompt: Prompt,
        options: Options,
        *,
        drafter: Drafter | None = None,
        first_plain: bool = True,
        pieces: bool = True,
        probabilities: bool = False,
        reuse: bool = False,
        ended: Callable[[str], None] | None = None,
    ) -> Stream:
        """`LLM.start`."""


def _send(conversation: Conversation, text: str, options: GenerateOptions) -> Generation:
    """Say `text` as the user, and get the answer: what `LLM.chat` gives of all messages, with the same options.

    Message and answer then stand in `messages`. An answer that is broken off (Ctrl-C, an error) stands there as far as
    it came; one that was broken off before its first token leaves the conversation as it was. Raises `SelfspecError`
    as `LLM.chat` does, when the conversation outgrows the context too; nothing is lost then.
    """
    return conversation.run(text, options, drafter=options.drafter, probabilities=options.probabilities)


def _stream(conversation: Conversation, text: str, options: GenerateOptions) -> Stream:
    """Like `send`, but returns at once; iterate over the pieces of the answer as they come.

    Message and answer stand in `messages` when the stream has ended, however it ends, unless the conversation has gone
    on or was reset in the meantime.
    """
    return conversation.start(text, options, drafter=options.drafter, probabilities=options.probabilities)


class Conversation:
    """What was said so far, and what is said next; made by `LLM.conversation`.

    The keys of what was said stay in the model's cache, and each answer reads only what of its prompt is new: as far
    as the prompt's tokens begin as the last ones did. Any other use of the model in between (but for other
    conversations, which keep what they share) empties the cache, and the next answer reads everything anew, as it does
    for a drafter that reads the prompt's streams. The answers are the same (below float64 but for near-ties, as a pass
    over fewer tokens rounds otherwise). The model's weights are to stay as they are; after a change, one `generate` in
    between has everything read anew.
    """

    def __init__(self, llm: Speaker, *, system: str | None = None) -> None:
        self._llm = llm
        self._system = [] if system is None else [message("system", system)]
        if system is not None:
            check_system(llm.tokenizer)
        render(llm.tokenizer, [*self._system, message("user", "x")])  # where there is no template, say so now
        self._messages = list(self._system)

    send = takes(GenerateOptions, _send)
    stream = takes(GenerateOptions, _stream)

    @property
    def messages(self) -> list[dict[str, str]]:
        """A copy of all messages, the system's first: `{"role": ..., "content": ...}`."""
        return [dict(one) for one in self._messages]

    @property
    def answers(self) -> int:
        """How many answers were given."""
        return sum(one["role"] == "assistant" for one in self._messages)

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self._messages = list(self._system)

    def prompt(self, text: str) -> list[int]:
        """The token ids that the model would answer if `text` were said now. Raises `SelfspecError`."""
        return render(self._llm.tokenizer, self._with(text))

    def run(
        self, text: str, options: Options, *, drafter: Drafter | None = None, probabilities: bool = False
    ) -> Generation:
        """`send`, with its options in one object."""
        stream = self.start(
            text, options, drafter=drafter, first_plain=False, pieces=False, probabilities=probabilities
        )
        for _ in stream:
            pass
        return stream.result

    def start(
        self,
        text: str,
        options: Options,
        *,
        drafter: Drafter | None = None,
        first_plain: bool = True,
        pieces: bool = True,
        probabilities: bool = False,
    ) -> Stream:
        """`stream`, with its options in one object; `first_plain` and `pieces` as in `LLM.start`."""
        before, asked = self._messages, self._with(text)

        def ended(answer: str) -> None:
            if self._messages is before:
                self._messages = [*asked, message("assistant", answer)]

        return self._llm.start(
            render(self._llm.tokenizer, asked),
            options,
            drafter=drafter,
            first_plain=first_plain,
            pieces=pieces,
            probabilities=probabilities,
            reuse=True,
            ended=ended,
        )

    def _with(self, text: str) -> list[dict[str, str]]:
        return [*self._messages, message("user", text)]
