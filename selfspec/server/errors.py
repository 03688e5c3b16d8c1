"""Errors as the OpenAI API tells them: a status, and JSON that says what is wrong, where. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selfspec.basics.errors import one_line

MOST = 500  # characters of a message, which may quote what was sent
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a client is told: `status` (4xx: its request is wrong or too early; 5xx: the server's state) and a line."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = one_line(message)[:MOST]
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def as_dict(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)
