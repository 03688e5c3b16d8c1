"""The responses of the two endpoints in the OpenAI API's format, as one object or as chunks of a stream."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from selfspec.server.request_state import Call, EndReason, TextUpdate

if TYPE_CHECKING:
    from selfspec.llm.request import TokenLogprobs

LOWEST = -9999.0  # the API's log probability of a token with probability 0
_FINISH = {"end": "stop", "stop": "stop", "guide": "stop", "length": "length", "time": "length"}
Spell = Callable[[int], bytes]  # returns the bytes of a token


class TextOffsets:
    """Where each token of a text begins, in characters: one split over several tokens counts with the last of them.

    `start`: the characters before the first token. `special`: ids of tokens that texts leave out.
    """

    def __init__(self, start: int, special: frozenset[int]) -> None:
        self._next, self._special = start, special
        self._decode = codecs.getincrementaldecoder("utf-8")("ignore").decode

    def add(self, token: int, spell: Spell) -> int:
        """Return where the next token begins."""
        begin = self._next
        if token not in self._special:
            self._next += len(self._decode(spell(token)))
        return begin


class ResponseSchema(Protocol):
    """The response format of one endpoint.

    `prefix`: the first characters of response ids. `response_object`, `chunk_object`: the API's object names of
    responses and of stream chunks.
    """

    prefix: str
    response_object: str
    chunk_object: str

    def choice(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        """Return the entry of one finished text in the response's `choices`."""

    def delta(
        self, index: int, text: str | None, logprobs: dict[str, Any] | None, finish: str | None, *, first: bool
    ) -> dict[str, Any]:
        """Return the entry in a stream chunk's `choices`; `first`: the chunk is the first of its text."""

    def logprobs(self, token_logprobs: Sequence[TokenLogprobs], spell: Spell, offsets: TextOffsets) -> dict[str, Any]:
        """Return the `logprobs` object for tokens, whose places in the text `offsets` counts."""


class ChatSchema:
    """The response format of `/v1/chat/completions`."""

    prefix, response_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        """Implement `ResponseSchema.choice`."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def delta(
        self, index: int, text: str | None, logprobs: dict[str, Any] | None, finish: str | None, *, first: bool
    ) -> dict[str, Any]:
        """Implement `ResponseSchema.delta`."""
        message_delta = {"role": "assistant"} if first else {}
        message_delta |= {} if text is None else {"content": text}
        return {"index": index, "delta": message_delta, "logprobs": logprobs, "finish_reason": finish}

    def logprobs(self, token_logprobs: Sequence[TokenLogprobs], spell: Spell, offsets: TextOffsets) -> dict[str, Any]:
        """Implement `ResponseSchema.logprobs`."""
        content = []
        for entry in token_logprobs:
            top = [_chat_token(token, logprob, spell) for token, logprob in entry.top]
            content.append({**_chat_token(entry.token, entry.logprob, spell), "top_logprobs": top})
        return {"content": content, "refusal": None}


class CompletionSchema:
    """The response format of `/v1/completions`."""

    prefix, response_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        """Implement `ResponseSchema.choice`."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def delta(
        self, index: int, text: str | None, logprobs: dict[str, Any] | None, finish: str | None, *, first: bool
    ) -> dict[str, Any]:
        """Implement `ResponseSchema.delta`."""
        return self.choice(index, text or "", logprobs, finish)

    def logprobs(self, token_logprobs: Sequence[TokenLogprobs], spell: Spell, offsets: TextOffsets) -> dict[str, Any]:
        """Implement `ResponseSchema.logprobs`; a token of invalid UTF-8 is written as its bytes, as in the API."""
        texts = [_written(spell(entry.token)) for entry in token_logprobs]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(entry.logprob) for entry in token_logprobs],
            "top_logprobs": [
                None if entry.logprob is None else {_written(spell(t)): _finite(logprob) for t, logprob in entry.top}
                for entry in token_logprobs
            ],
            "text_offset": [offsets.add(entry.token, spell) for entry in token_logprobs],
            "bytes": [list(spell(entry.token)) for entry in token_logprobs],
        }


CHAT: ResponseSchema = ChatSchema()
COMPLETION: ResponseSchema = CompletionSchema()


def finish_reason(update: TextUpdate) -> str | None:
    """Return the API's finish reason of a text; None while it runs. A text that the server ended counts as "length"."""
    if not update.ended:
        return None
    return _FINISH[update.finish] if update.finish is not None else "length"


def usage(call: Call) -> dict[str, Any]:
    """Return the `usage` object of a call: tokens of each prompt, counted once, and new tokens of all texts.

    `cached_tokens`: prompt tokens that were in the KV cache before the request.
    """
    prompt, new = call.parsed.prompt_tokens, call.total("tokens")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": min(prompt, call.num_cached)},
    }


def sources(call: Call, update: TextUpdate) -> dict[str, Any]:
    """Return the `selfspec` object of a stream chunk, which extends the API's format.

    `spans`: the chunk's text as pairs of origin and text. The other fields are statistics of drafting so far.
    """
    return {
        "spans": [[str(origin), text] for origin, text in update.spans],
        **{name: getattr(update, name) for name in ("tokens", "drafted", "accepted", "rounds")},
        "seconds": round(call.times.seconds, 4),
        "finish": update.finish or (update.end_reason and str(update.end_reason)),
    }


def cut_short(update: TextUpdate) -> bool:
    """Return whether the server ended a text before its first token, by timeout or shutdown."""
    return update.end_reason in (EndReason.TIME, EndReason.SHUTDOWN) and not update.tokens


def _chat_token(token: int, logprob: float | None, spell: Spell) -> dict[str, Any]:
    raw = spell(token)
    return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _written(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(float(logprob), LOWEST)
