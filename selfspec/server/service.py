"""The service that answers requests: it reads and parses the body, submits the call and makes the response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from selfspec.models.vocabularies import token_bytes_of
from selfspec.server.metrics import Metrics
from selfspec.server.middleware import Log, log_line
from selfspec.server.protocol import Settings
from selfspec.server.request_parser import ParsedRequest, RequestParser
from selfspec.server.request_schemas import (
    ApiError,
    BaseRequest,
    ChatBody,
    CompletionBody,
    disconnected,
    ending,
    read_body,
    timed_out,
)
from selfspec.server.request_state import Call
from selfspec.server.response_schemas import CHAT, COMPLETION, ResponseSchema
from selfspec.server.responses import Answer, when_gone
from selfspec.server.worker_pool import WorkerPool

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.text.guided import Guide


class BodyBudget:
    """The bytes that the bodies of requests in preparation may take together; used in the event loop only."""

    def __init__(self, most: int) -> None:
        self._left = most

    @contextmanager
    def reserve(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes bytes for one body until the block is left.

        The function raises `ApiError` of status 429 if fewer bytes are left.
        """
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if count > self._left:
                message = "the requests that arrive at this time are too large together; try again later"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": "10"})
            self._left -= count
            taken += count

        try:
            yield take
        finally:
            self._left += taken


async def read_raw(request: Request, *, most: int, seconds: float, take: Callable[[int], None]) -> bytes:
    """Return a request's body of at most `most` bytes, which must arrive within `seconds`.

    `take`: called with the bytes of each part, as of `BodyBudget.reserve`. The content type must be JSON, so that
    another site's page cannot post a request from a browser without a preflight. Raises `ApiError` for a larger or late
    body, and for another content type.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "expected a body of JSON, and the header 'Content-Type: application/json'")
    too_large = ApiError(413, f"the body is too large; expected at most {most} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                take(len(part))
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {seconds:g} seconds") from None
    except ClientDisconnect:
        raise disconnected() from None
    return bytes(body)


Body = TypeVar("Body", bound=BaseRequest)
_BODIES = 16  # bodies of the largest size that can be in preparation at a time
Read = Callable[[Body, "Guide | None"], ParsedRequest]
PATHS = ("/", "/v1/chat/completions", "/v1/completions", "/v1/models")  # labelled in the metrics


class Service:
    """Handlers of the requests for one model, which a worker pool decodes; a context manager that enters the pool.

    `log`: called with one log entry per request. A separate thread parses the requests, so that a long prompt does not
    block other responses, and another makes the guides of those that have a response format.
    """

    def __init__(self, llm: LLM, pool: WorkerPool, settings: Settings, *, log: Log = log_line) -> None:
        self.settings, self.pool = settings, pool
        longest = min(replica.max_seq_len for replica in pool.replicas)
        self.reader = RequestParser(llm, settings, longest=longest)
        self.metrics = Metrics(pool)
        self.draining = self.ended = False  # whether a shutdown has begun, and whether its time is over
        self._parsing = 0  # requests that are being parsed
        self._log = log
        self._spell, self._special = token_bytes_of(llm.tokenizer), frozenset(llm.tokenizer.all_special_ids)
        self._bodies = BodyBudget(_BODIES * settings.max_body)
        self._reading = ThreadPoolExecutor(1, "reading")
        self._guiding = ThreadPoolExecutor(1, "guiding")

    def __enter__(self) -> Service:
        self.pool.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reading.shutdown(cancel_futures=True)
        self._guiding.shutdown(cancel_futures=True)
        self.pool.__exit__(kind, error, traceback)

    @property
    def idle(self) -> bool:
        """Whether no text is running or waiting, and no request is being parsed."""
        return not (self.pool.running or self.pool.waiting or self._parsing)

    def log(self, entry: dict[str, Any]) -> None:
        """Count a request in the metrics and write its log line."""
        path = entry["path"] if entry["path"] in PATHS else "other"
        self.metrics.requests.labels(path, str(entry["status"])).inc()
        self._log(entry)

    async def chat(self, request: Request) -> Response:
        """Answer a chat request. Raises `ApiError`."""
        return await self._answer(request, ChatBody, self.reader.chat, CHAT)

    async def completion(self, request: Request) -> Response:
        """Answer a completion request. Raises `ApiError`."""
        return await self._answer(request, CompletionBody, self.reader.completion, COMPLETION)

    async def _answer(self, request: Request, kind: type[Body], read: Read[Body], shape: ResponseSchema) -> Response:
        start, settings = time.perf_counter(), self.settings
        rows = settings.rows * len(self.pool.replicas)
        retry_after = self.metrics.mean_seconds * (1 + self.pool.waiting / rows)
        with self._bodies.reserve() as take:
            raw = await read_raw(request, most=settings.max_body, seconds=settings.reading, take=take)
            if self.draining:
                raise ending()
            body = read_body(kind, raw)
            self.reader.check_model(body.model)
            self.pool.check_room(body.num_texts, retry_after=retry_after)
            self._parsing += 1
            try:
                parsed = await self._parsed(request, body, read)
                if self.ended:
                    raise ending()
                self.pool.submit(call := Call(parsed), retry_after=retry_after)
            finally:
                self._parsing -= 1
        return Answer(
            call,
            self.pool,
            shape,
            spell=self._spell,
            special=self._special,
            timeout=settings.timeout - (time.perf_counter() - start),
            ended=self.metrics.ended,
        )

    async def _parsed(self, request: Request, body: Body, read: Read[Body]) -> ParsedRequest:
        """Parse a body in the threads for it. Raises `ApiError`, also if the client leaves or the time is up."""
        parsing = asyncio.create_task(self._parse(body, read))
        gone = asyncio.create_task(when_gone(request.receive, parsing.cancel))
        try:
            async with asyncio.timeout(self.settings.timeout):
                return await parsing
        except TimeoutError:
            raise timed_out() from None
        except asyncio.CancelledError:
            if gone.done():
                raise disconnected() from None
            raise
        finally:
            gone.cancel()

    async def _parse(self, body: Body, read: Read[Body]) -> ParsedRequest:
        loop = asyncio.get_running_loop()
        guide = None
        if body.response_format is not None:
            guide = await loop.run_in_executor(self._guiding, self.reader.guide, body)
        return await loop.run_in_executor(self._reading, read, body, guide)
