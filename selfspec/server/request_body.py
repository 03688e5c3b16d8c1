"""Reading of request bodies: their type, size and time, and the memory that all of them take together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request

from selfspec.server.errors import ApiError
from selfspec.server.responses import GONE


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
        raise GONE from None
    return bytes(body)
