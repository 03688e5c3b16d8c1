"""The service that answers requests: it parses the body, submits the call to the pool and makes the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from selfspec.models.vocabularies import token_bytes_of
from selfspec.server.errors import ApiError
from selfspec.server.metrics import Metrics
from selfspec.server.middleware import Log, log_line
from selfspec.server.request_parser import ParsedRequest, RequestParser
from selfspec.server.request_schemas import BaseRequest, ChatBody, CompletionBody, read_body
from selfspec.server.request_state import Call
from selfspec.server.response_schemas import CHAT, COMPLETION, ResponseSchema
from selfspec.server.responses import GONE, Answer
from selfspec.server.settings import Settings
from selfspec.server.worker_pool import WorkerPool

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM

Body = TypeVar("Body", bound=BaseRequest)
PATHS = ("/", "/v1/chat/completions", "/v1/completions", "/v1/models")  # labelled in the metrics


class Service:
    """Handlers of the requests for one model, which a worker pool decodes; a context manager that enters the pool.

    `log`: called with one log entry per request. A separate thread parses the requests, so that a long prompt does not
    block other responses.
    """

    def __init__(self, llm: LLM, pool: WorkerPool, settings: Settings, *, log: Log = log_line) -> None:
        self.settings, self.pool = settings, pool
        longest = min(replica.max_seq_len for replica in pool.replicas)
        self.reader = RequestParser(llm, settings, longest=longest)
        self.metrics = Metrics(pool)
        self.draining = False
        self._log = log
        self._spell = token_bytes_of(llm.tokenizer)
        self._reading = ThreadPoolExecutor(1, "reading")

    def __enter__(self) -> Service:
        self.pool.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reading.shutdown(cancel_futures=True)
        self.pool.__exit__(kind, error, traceback)

    @property
    def idle(self) -> bool:
        """Whether no text is running or waiting."""
        return not (self.pool.running or self.pool.waiting)

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

    async def _answer(
        self, request: Request, kind: type[Body], read: Callable[[Body], ParsedRequest], shape: ResponseSchema
    ) -> Response:
        raw = await read_raw(request, most=self.settings.max_body, seconds=self.settings.reading)
        if self.draining:
            raise ApiError(503, "the server is ending", headers={"Retry-After": "10"})
        body = read_body(kind, raw)
        self.reader.check_model(body.model)
        parsed = await asyncio.get_running_loop().run_in_executor(self._reading, read, body)
        call = Call(parsed)
        rows = self.settings.rows * len(self.pool.replicas)
        self.pool.submit(call, retry_after=self.metrics.mean_seconds * (1 + self.pool.waiting / rows))
        return Answer(
            call,
            self.pool,
            shape,
            spell=self._spell,
            timeout=self.settings.timeout,
            ended=self.metrics.ended,
        )


async def read_raw(request: Request, *, most: int, seconds: float) -> bytes:
    """Return a request's body of at most `most` bytes, which must arrive within `seconds`.

    The content type must be JSON, so that another site's page cannot post a request from a browser without a preflight.
    Raises `ApiError` for a larger or late body, and for another content type.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "expected a body of JSON, and the header 'Content-Type: application/json'")
    too_large = ApiError(413, f"the body is too large; expected at most {most} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {seconds:g} seconds") from None
    except ClientDisconnect:
        raise GONE from None
    return bytes(body)
