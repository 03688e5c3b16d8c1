"""Schemas of request bodies, checked field by field, and errors in the OpenAI API's format.

Errors are `ApiError`s that name the field.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from selfspec.basics.errors import as_signs, one_line

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


def ending() -> ApiError:
    """Return the error of a request that comes, or is not answered, when the server ends."""
    return ApiError(503, "the server is ending", headers={"Retry-After": "10"})


def disconnected() -> ApiError:
    """Return the error of a request whose client has disconnected; only the log shows it."""
    return ApiError(499, "the client went away")


def timed_out() -> ApiError:
    """Return the error of a request that has no token when its time is up."""
    return ApiError(504, "the request timed out before its first token", code="timeout")


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an error of status 400, for a request that is invalid or not supported."""
    return ApiError(400, message, param=param, code=code)


IGNORED_FIELDS = frozenset(  # fields that change no text: accepted and ignored
    (
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)
UNSUPPORTED_FIELDS = {  # fields that would change the response: refused unless their value requests nothing
    "tools": "tools are not served",
    "tool_choice": "tools are not served",
    "functions": "functions are not served",
    "function_call": "functions are not served",
    "audio": "audio is not served",
    "web_search_options": "web search is not served",
    "reasoning_effort": "a reasoning effort is not served",
    "verbosity": "verbosity is not served",
    "suffix": "text is only continued; inserting before a suffix is not served",
    "use_beam_search": "beam search is not served",
}
_NOTHING: tuple[Any, ...] = (None, "", "none", "auto", [], {}, False)  # values that request nothing
MOST_STOPS = 16
MOST_CHOICES = 128

Body = TypeVar("Body", bound="BaseRequest")


def _whole(value: Any) -> Any:
    """Return a whole number that was sent as a float, such as 64.0, as an integer; anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _seed(value: Any) -> Any:
    """Return None for -1, which means no seed."""
    return None if value == -1 and not isinstance(value, bool) else value


Integer = Annotated[int, BeforeValidator(_whole)]


class Strict(BaseModel):
    """A model of exactly the named fields and types; no other field and no type conversion is accepted."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(Strict):
    """Options of a streamed response. `selfspec`: also send each piece's origin, and statistics of drafting."""

    include_usage: bool = False
    include_obfuscation: bool = False
    selfspec: bool = False


class JsonSchema(Strict):
    """A named JSON schema in the API's format; the text always follows it, with or without `strict`."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The required format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_text(self) -> dict[str, Any] | None:
        """The JSON schema of the text; None: any text. Raises `ApiError` if `type` and `json_schema` contradict."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("json_schema: expected if the type is 'json_schema', and only then", "response_format")
        if self.json_schema is not None and not (self.json_schema.name or self.json_schema.schema_ is not None):
            raise wrong("json_schema: has neither a schema nor a name", "response_format")
        schema = None if self.json_schema is None else self.json_schema.schema_
        return {"type": "object"} if schema is None and self.type != "text" else schema


class BaseRequest(Strict):
    """The fields that both endpoints accept. A field that is null counts as left out."""

    model: str
    n: Annotated[Integer, Field(ge=1, le=MOST_CHOICES)] = 1
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[Integer, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: Annotated[Annotated[Integer, Field(ge=0, lt=2**63)] | None, BeforeValidator(_seed)] = None
    stop: Any = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises `ApiError`."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
            raise wrong("expected a text, or a list of texts", "stop")
        stops = [text for text in stops if text]
        if len(stops) > MOST_STOPS:
            raise wrong(f"expected at most {MOST_STOPS} texts, got {len(stops)}", "stop")
        return tuple(stops)

    @property
    def biases(self) -> dict[int, float]:
        """The logit biases by token id. Raises `ApiError`."""
        try:
            return {int(token): bias for token, bias in self.logit_bias.items()}
        except ValueError:
            raise wrong("expected numbers by token ids", "logit_bias") from None

    @property
    def limit(self) -> int | None:
        """The requested maximum number of new tokens; None: not requested."""
        return self.max_tokens

    @property
    def num_texts(self) -> int:
        """The number of requested texts. Raises `ApiError`."""
        return self.n


class ChatBody(BaseRequest):
    """The body of a request to `/v1/chat/completions`."""

    messages: list[Any]
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    modalities: list[Literal["text"]] = ["text"]

    @property
    def limit(self) -> int | None:
        """The requested maximum number of new tokens: `max_completion_tokens`, or the older field `max_tokens`.

        None: neither was given. Raises `ApiError` if the two fields contradict each other.
        """
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise wrong("max_tokens and max_completion_tokens contradict each other; give one", "max_completion_tokens")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        """The number of top log probabilities per token; None: no log probabilities at all. Raises `ApiError`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs: given without logprobs; expected logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(BaseRequest):
    """The body of a request to `/v1/completions`."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    max_tokens: Annotated[Integer, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None

    @property
    def top(self) -> int | None:
        """The number of top log probabilities per token; None: no log probabilities at all.

        Raises `ApiError` if `best_of` differs from `n`.
        """
        if self.best_of is not None and self.best_of != self.n:
            raise wrong("best_of other than n is not served; request n texts and choose among them", "best_of")
        return self.logprobs

    @property
    def limit(self) -> int | None:
        """The requested maximum number of new tokens; None: not requested. Raises `ApiError` for 0 without `echo`."""
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens: 0 without echo; expected 1 or more", "max_tokens")
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids. Raises `ApiError`."""
        prompt = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(map(_is_whole, prompt))):
            return [prompt]
        if isinstance(prompt, list) and prompt and all(map(_is_prompt, prompt)):
            return prompt
        raise wrong("expected a text, token ids, or a list of either, none of them empty", "prompt")

    @property
    def num_texts(self) -> int:
        """The number of requested texts: `n` for each prompt. Raises `ApiError`."""
        return self.n * len(self.prompts)


def read_body(kind: type[Body], raw: bytes) -> Body:
    """Parse and validate the body of a request. Raises `ApiError`, which names the wrong field."""
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise wrong(f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise wrong(f"the body is not a JSON object, but {_named(data)}")
    for name, why in UNSUPPORTED_FIELDS.items():
        if name in data and data.pop(name) not in _NOTHING:
            raise wrong(f"{name}: {why}", name, "unsupported_parameter")
    fields = {name: value for name, value in _given(data).items() if name not in IGNORED_FIELDS}
    fields |= {name: _given(value) for name, value in fields.items() if name in _NESTED and isinstance(value, dict)}
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _as_api_error(error, kind.model_fields) from None


_NESTED = ("stream_options", "response_format")  # fields whose own fields may be null, which is as if left out


def _given(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an object without those that are null, of `json_schema` too."""
    given = {name: value for name, value in data.items() if value is not None}
    schema = given.get("json_schema")
    return given | {"json_schema": _given(schema)} if isinstance(schema, dict) else given


def _as_api_error(error: ValidationError, fields: Iterable[str]) -> ApiError:
    """Return the first validation error as an `ApiError` of one line; `fields`: the names that the body may have."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))[:200]
    match first["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(where, fields, 1, cutoff=0.7)
            hint = f"; did you mean {near[0]}?" if near else ""
            return wrong(f"{where}: no such field{hint}", where, "unknown_parameter")
        case "missing":
            return wrong(f"{where} is missing", where, "missing_required_parameter")
    return wrong(f"{where}: {first['msg']}", where)


def _named(value: object) -> str:
    names = {str: "a text", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(_is_whole, value)))
