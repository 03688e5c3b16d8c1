"""The two endpoints' answers, whole and in pieces, as the OpenAI API has them. Knows nothing of HTTP and of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from selfspec.server.request_state import Call, TextUpdate, Why

if TYPE_CHECKING:
    from selfspec.llm.request import TokenLogprobs

LOWEST = -9999.0  # what the API says where a probability is 0
_FINISH = {"end": "stop", "stop": "stop", "guide": "stop", "length": "length", "time": "length"}
Spell = Callable[[int], bytes]


class ResponseSchema(Protocol):
    """How one endpoint tells things. `prefix`: of ids; `whole` and `piece`: what its answers are called."""

    prefix: str
    whole: str
    piece: str

    def choice(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        """One finished text."""

    def delta(
        self, index: int, text: str | None, logprobs: dict[str, Any] | None, finish: str | None, *, first: bool
    ) -> dict[str, Any]:
        """A piece of a text; `first`: nothing came before."""

    def logprobs(self, told: Sequence[TokenLogprobs], spell: Spell, offset: int) -> dict[str, Any]:
        """Log probabilities of tokens; `offset`: characters before them."""


class ChatSchema:
    """Of `/v1/chat/completions`."""

    prefix, whole, piece = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        """As `Shape.choice`."""
        said = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": said, "logprobs": logprobs, "finish_reason": finish}

    def delta(
        self, index: int, text: str | None, logprobs: dict[str, Any] | None, finish: str | None, *, first: bool
    ) -> dict[str, Any]:
        """As `Shape.delta`."""
        said = {"role": "assistant"} if first else {}
        said |= {} if text is None else {"content": text}
        return {"index": index, "delta": said, "logprobs": logprobs, "finish_reason": finish}

    def logprobs(self, told: Sequence[TokenLogprobs], spell: Spell, offset: int) -> dict[str, Any]:
        """As `Shape.logprobs`."""
        content = []
        for one in told:
            top = [_chat_token(token, logprob, spell) for token, logprob in one.top]
            content.append({**_chat_token(one.token, one.logprob, spell), "top_logprobs": top})
        return {"content": content, "refusal": None}


class CompletionSchema:
    """Of `/v1/completions`."""

    prefix, whole, piece = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        """As `Shape.choice`."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def delta(
        self, index: int, text: str | None, logprobs: dict[str, Any] | None, finish: str | None, *, first: bool
    ) -> dict[str, Any]:
        """As `Shape.delta`."""
        return self.choice(index, text or "", logprobs, finish)

    def logprobs(self, told: Sequence[TokenLogprobs], spell: Spell, offset: int) -> dict[str, Any]:
        """As `Shape.logprobs`; a token that is not whole characters is written as its bytes, as the API does."""
        texts = [_written(spell(one.token)) for one in told]
        offsets = []
        for one in told:
            offsets.append(offset)
            offset += len(spell(one.token).decode(errors="ignore"))
        return {
            "tokens": texts,
            "token_logprobs": [_finite(one.logprob) for one in told],
            "top_logprobs": [{_written(spell(token)): _finite(logprob) for token, logprob in one.top} for one in told],
            "text_offset": offsets,
            "bytes": [list(spell(one.token)) for one in told],
        }


CHAT: ResponseSchema = ChatSchema()
COMPLETION: ResponseSchema = CompletionSchema()


def finish_reason(update: TextUpdate) -> str | None:
    """Why a text ended, in the API's words; None while it goes on. Cut by the server counts as cut by length."""
    if not update.ended:
        return None
    return _FINISH[update.finish] if update.finish is not None else "length"


def usage(call: Call) -> dict[str, Any]:
    """The tokens of a call: its prompts' once, and all new ones; `cached_tokens` were not read again."""
    prompt, new = call.ask.prompt_tokens, call.total("tokens")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": min(prompt, call.total("kept"))},
    }


def sources(call: Call, update: TextUpdate) -> dict[str, Any]:
    """What the extension tells of a text: where a piece came from (`spans`), and what drafts have brought so far."""
    return {
        "spans": [[str(origin), text] for origin, text in update.spans],
        **{name: getattr(update, name) for name in ("tokens", "drafted", "accepted", "rounds")},
        "seconds": round(call.times.seconds, 4),
        "finish": update.finish or (update.why and str(update.why)),
    }


def cut_short(update: TextUpdate) -> bool:
    """Whether the server ended a text before it began, as its time was up or the server is ending."""
    return update.why in (Why.TIME, Why.SHUTDOWN) and not update.tokens


def _chat_token(token: int, logprob: float, spell: Spell) -> dict[str, Any]:
    raw = spell(token)
    return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _written(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(float(logprob), LOWEST)
