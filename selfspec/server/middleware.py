"""The middleware around every request: it assigns a request id, checks the API key and writes one log line."""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import sys
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.server.request_schemas import ApiError

NOTES = "selfspec.notes"  # key in a request's ASGI scope, under which handlers add fields to the request's log line
_MOST_PATH = 200  # maximum characters of a path in the log
_POLLED = ("/health", "/metrics")  # paths that are not logged: machines poll them
Log = Callable[[dict[str, Any]], None]


def log_line(entry: dict[str, Any]) -> None:
    """Write one JSON line to standard error; a closed stream is ignored."""
    with contextlib.suppress(OSError):
        sys.stderr.write(json.dumps(entry) + "\n")  # ASCII: a request cannot send control characters to a terminal
        sys.stderr.flush()


def refusal(error: ApiError) -> JSONResponse:
    """Return the HTTP response for an error."""
    return JSONResponse(error.as_dict(), error.status, error.headers)


class AuthMiddleware:
    """ASGI middleware around the whole app.

    `hosts`: the values of the `Host` header that are answered, without port (none: any). `log` receives every request's
    log entry, except for polled paths.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, hosts: Collection[str] = (), log: Log) -> None:
        self._app, self._log = app, log
        self._hosts = frozenset(host.lower() for host in hosts)
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        name, start = uuid4().hex, time.perf_counter()
        notes: dict[str, Any] = {"id": name}
        scope[NOTES] = notes
        result = {"status": 499}  # the status if the client disconnects before the response

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                result["status"] = notes.pop("status", message["status"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        problem = None if self._meant(scope) else _OTHER_HOST
        if problem is None and not self._known(scope):
            problem = _NO_KEY
        app = self._app if problem is None else refusal(problem)
        if problem is not None:
            notes["error"] = problem.message
        try:
            await app(scope, receive, sending)
        except Exception:
            result["status"] = 500
            raise
        finally:
            if scope["path"] not in _POLLED:
                timestamp = datetime.now(UTC).isoformat(timespec="milliseconds")
                asked = {"method": scope["method"][:20], "path": scope["path"][:_MOST_PATH], "status": result["status"]}
                self._log({"at": timestamp, **notes, **asked, "seconds": round(time.perf_counter() - start, 4)})
        return None

    def _meant(self, scope: Scope) -> bool:
        """Return whether a request names a host that is answered.

        A page of another site whose name resolves to this address (DNS rebinding) names that site.
        """
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
        return not self._hosts or re.sub(r":\d*$", "", host) in self._hosts

    def _known(self, scope: Scope) -> bool:
        """Return whether a request has the API key or needs none; the key is compared in constant time.

        The scheme's name is case-insensitive (RFC 9110). An OPTIONS request needs no key, as browsers send none.
        """
        if self._key is None or not scope["path"].startswith("/v1") or scope["method"] == "OPTIONS":
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"


_OTHER_HOST = ApiError(
    421, "this server answers requests to this machine only, by the names localhost and 127.0.0.1; or set --api-key"
)
_NO_KEY = ApiError(
    401,
    "expected the server's key, as 'Authorization: Bearer KEY'",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
