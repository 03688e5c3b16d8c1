"""The response to a call while its texts are decoded: one JSON body, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from selfspec.basics.files import json_line
from selfspec.server.middleware import NOTES, refusal
from selfspec.server.protocol import ABORT
from selfspec.server.request_schemas import ApiError, disconnected, ending, timed_out
from selfspec.server.request_state import Call, EndReason, TextUpdate
from selfspec.server.response_schemas import (
    ResponseSchema,
    Spell,
    TextOffsets,
    cut_short,
    finish_reason,
    sources,
    usage,
)
from selfspec.server.worker_pool import WorkerPool

if TYPE_CHECKING:
    from selfspec.llm.request import TokenLogprobs

_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
LAST = 5  # seconds for responses to reach their clients once their texts have ended
_CUT = {EndReason.TIME: timed_out, EndReason.SHUTDOWN: ending}


class Answer(Response):
    """The response to one call that the pool has accepted. A client disconnect and a timeout end the call.

    `shape`: the endpoint's response format. `spell`: returns the bytes of a token. `special`: the ids of tokens that
    texts leave out. `timeout`: seconds from the call's arrival. `ended`: called with the call after the response.
    """

    def __init__(
        self,
        call: Call,
        pool: WorkerPool,
        shape: ResponseSchema,
        *,
        spell: Spell,
        special: frozenset[int],
        timeout: float,
        ended: Callable[[Call], None],
    ) -> None:
        super().__init__()
        self._call, self._pool, self._shape, self._spell = call, pool, shape, spell
        self._timeout, self._ended = timeout, ended
        self._made = int(time.time())
        self._begun = [False] * len(call.jobs)
        scored = call.parsed.echo and call.parsed.top is not None  # log probabilities begin with the prompt's
        self._offsets = [TextOffsets(0 if scored else len(shown), special) for shown in call.parsed.shown]
        self._name = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as an ASGI application."""
        notes = scope.get(NOTES, {})
        self._name = f"{self._shape.prefix}{notes.get('id', '')}"
        try:
            async with self._cancel_on_disconnect(receive, scope.get(ABORT, lambda: None)):
                if self._call.parsed.stream:
                    await self._stream(scope, receive, send)
                else:
                    await (await self._full_response())(scope, receive, send)
        finally:
            self._ended(self._call)
            notes.update(_noted(self._call))

    @contextlib.asynccontextmanager
    async def _cancel_on_disconnect(self, receive: Receive, abort: Callable[[], None]) -> AsyncIterator[None]:
        """End the call if the client disconnects, and at its time limit; `LAST` seconds later, `abort` the connection.

        A client that reads slowly does not get more time than that.
        """
        call, pool, loop = self._call, self._pool, asyncio.get_running_loop()
        left = max(0.0, self._timeout - call.times.seconds)
        timer, last = loop.call_later(left, pool.cancel, call, EndReason.TIME), loop.call_later(left + LAST, abort)
        watch = asyncio.create_task(when_gone(receive, lambda: pool.cancel(call, EndReason.GONE)))
        try:
            yield
        finally:
            timer.cancel()
            last.cancel()
            watch.cancel()
            if not call.ended:
                pool.cancel(call, EndReason.GONE)

    async def _full_response(self) -> Response:
        call, shape = self._call, self._shape
        texts = list(call.parsed.shown)
        token_logprobs: list[list[TokenLogprobs]] = [[] for _ in call.jobs]
        async for update in call.updates():
            texts[update.index] += update.text
            token_logprobs[update.index] += update.logprobs
        if (problem := _problem(call.latest)) is not None:
            return refusal(problem)
        choices = []
        for update, text, logprobs in zip(call.latest, texts, token_logprobs, strict=True):
            offsets = self._offsets[update.index]
            choice_logprobs = None if call.parsed.top is None else shape.logprobs(logprobs, self._spell, offsets)
            choices.append(shape.choice(update.index, text, choice_logprobs, finish_reason(update)))
        return JSONResponse(self._framed(shape.response_object, choices) | {"usage": usage(call)})

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the events. The head is sent at once, so that an error before the first token is an event, too."""
        headers = [(name.encode(), value.encode()) for name, value in _EVENTS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events(self._call.updates()):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        return await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, updates: AsyncIterator[TextUpdate]) -> AsyncIterator[bytes]:
        async for update in updates:
            if (problem := update.error if any(self._begun) else _problem([update])) is not None:
                yield _event(problem.as_dict())
                break
            has_text = update.text or update.logprobs or update.spans
            if has_text or not update.ended:
                yield _event(self._piece(replace(update, ended=False)))
            if update.ended:  # the finish reason comes in an event of its own
                yield _event(self._piece(replace(update, text="", logprobs=(), spans=()) if has_text else update))
        if self._call.parsed.usage:
            yield _event(self._framed(self._shape.chunk_object, []) | {"usage": usage(self._call)})
        yield b"data: [DONE]\n\n"

    def _piece(self, update: TextUpdate) -> dict[str, Any]:
        call, index = self._call, update.index
        begun, self._begun[index] = self._begun[index], True
        text = update.text if begun else call.parsed.shown[index] + update.text
        logprobs = None
        if call.parsed.top is not None and update.logprobs:
            logprobs = self._shape.logprobs(update.logprobs, self._spell, self._offsets[index])
        choice = self._shape.delta(index, text or None, logprobs, finish_reason(update), first=not begun)
        framed = self._framed(self._shape.chunk_object, [choice])
        if call.parsed.usage:
            framed["usage"] = None
        if call.parsed.sources:
            framed["selfspec"] = sources(call, update)
        return framed

    def _framed(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        model = self._call.parsed.model
        return {"id": self._name, "object": kind, "created": self._made, "model": model, "choices": choices}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json_line(data, separators=(",", ":")).encode() + b"\n\n"


async def when_gone(receive: Receive, act: Callable[[], object]) -> None:
    """Call `act` once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
    act()


def _problem(updates: list[TextUpdate]) -> ApiError | None:
    """Return the error to respond with if no text can be sent; otherwise None."""
    for update in updates:
        if update.error is not None:
            return update.error
        if update.end_reason is EndReason.GONE:
            return disconnected()
    cut = next((update.end_reason for update in updates if update.end_reason is not None), None)
    return _CUT[cut]() if cut is not None and all(map(cut_short, updates)) else None


def _noted(call: Call) -> dict[str, Any]:
    """Return the fields that a call adds to its request's log entry."""
    times, seconds, tokens = call.times, call.times.seconds, call.total("tokens")
    finishes = [str(finish or EndReason.GONE) for finish in call.finishes]
    problem = _problem(call.latest)
    return {
        **({} if problem is None else {"error": problem.message}),
        "model": call.parsed.model,
        "stream": call.parsed.stream,
        "prompt_tokens": call.parsed.prompt_tokens,
        "tokens": tokens,
        "drafted": call.total("drafted"),
        "accepted": call.total("accepted"),
        "finish": finishes[0] if len(finishes) == 1 else finishes,
        "queue_seconds": None if times.admitted is None else round(times.admitted - times.arrived, 4),
        "first_token_seconds": None if times.first is None else round(times.first - times.arrived, 4),
        "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
    }
