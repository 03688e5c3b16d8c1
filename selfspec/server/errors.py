"""Errors in the OpenAI API's format: an HTTP status, and JSON that says what is wrong and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selfspec.basics.control_characters import as_signs
from selfspec.basics.errors import one_line

MOST = 500  # maximum characters of a message, which may quote the request
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error response in the OpenAI API's format.

    `status`: the HTTP status. `param`: the request field that is wrong; None if it is no single field. `code`: the
    API's machine-readable code, if any. `headers`: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = as_signs(one_line(message))[:MOST]  # a client shows in a terminal what a request quoted
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def as_dict(self) -> dict[str, Any]:
        """The body of the error response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an error of status 400, for a request that is invalid or not supported."""
    return ApiError(400, message, param=param, code=code)
