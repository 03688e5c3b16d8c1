"""A thousand kinds of wrong requests, each with the path, method, headers and raw body of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

COMPLETION = {"model": "toy", "prompt": "x = ", "max_tokens": 2}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
NO_NUMBERS = ("hot", "1", [], [1], {}, {"a": 1}, True, False, [[]], "null", -1e9, 1e300, "∞")
NO_WHOLE_NUMBERS = (0.5, 1.5, -7, -0.5, 10**40)
NO_TRUTHS = ("yes", "true", 1, 0, -1, 0.5, [], [True], {}, {"a": True}, "")
NO_TEXTS = (1, 0.5, True, [], ["toy"], {}, {"a": "toy"})
NO_OBJECTS = ("a", 1, True, [], ["a"], 0.5, [{}], "{}")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WHOLE = ("n", "max_tokens", "seed")
UNSUPPORTED = (
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "audio",
    "web_search_options",
    "reasoning_effort",
    "verbosity",
    "suffix",
    "use_beam_search",
)
UNKNOWN = (
    "prefix",
    "engine",
    "beam",
    "mirostat",
    "typical_p",
    "num_ctx",
    "options",
    "system",
    "context",
    "raw",
    "images",
    "format",
    "max_token",
    "temprature",
    "topp",
    "prompts",
    "message",
    "model_name",
    "stops",
    "",
    " ",
    "é",
    "a" * 300,
    "n ",
    "N",
    "0",
    "-",
    "__class__",
    "a.b",
)
FORMATS = (
    {},
    {"type": "json"},
    {"type": 1},
    {"type": None},
    {"type": "json_schema"},
    {"type": "text", "json_schema": {"schema": {}}},
    {"type": "json_schema", "json_schema": {}},
    {"type": "json_schema", "json_schema": {"schema": []}},
    {"type": "json_schema", "json_schema": {"schema": "x"}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}},
    {"type": "json_schema", "json_schema": {"schema": {"enum": []}}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}},
    {"type": "json_schema", "json_schema": {"schema": {"patternProperties": {"a": {}}}}},
    {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}},
    {"type": "json_schema", "json_schema": {"schema": {}, "name": 1}},
    {"type": "json_schema", "json_schema": {"schema": {}, "other": 1}},
    {"type": "text", "other": 1},
)
MESSAGES = (
    [],
    [{}],
    [1],
    [None],
    ["Hi"],
    [[]],
    [{"role": "user"}],
    [{"content": "Hi"}],
    [{"role": "user", "content": 1}],
    [{"role": "user", "content": {}}],
    [{"role": "user", "content": [1]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}],
    [{"role": 1, "content": "Hi"}],
    [{"role": "", "content": "Hi"}],
    [{"role": "robot", "content": "Hi"}],
    [{"role": "tool", "content": "Hi"}],
    [{"role": "user", "content": "Hi"}, {}],
    [{"role": "user", "content": "\ud800"}],
    "Hi",
    1,
    True,
    {},
    {"role": "user", "content": "Hi"},
)
PROMPTS = (
    "",
    [],
    [[]],
    [""],
    [1.5],
    ["a", 1],
    [None],
    [True],
    {},
    {"a": 1},
    1,
    True,
    [[1, "a"]],
    [-1],
    [10**9],
    ["\ud800"],
)
BIASES = ({"a": 1}, {"1": "x"}, {"1": 101}, {"1": -101}, {"1": []}, {"1.5": 1}, {"-1": 1}, {"999999999": 1}, {"": 1})
CONTENT_TYPES = ("", "text/plain", "text/html", "application/xml", "multipart/form-data", "json", "application/jsonp")
NOWHERE = (
    "/v1",
    "/v1/embeddings",
    "/v1/edits",
    "/v1/models/other",
    "/v2/completions",
    "/completions",
    "/x",
    "/docs",
    "/v1/chat",
)
BODIES = (
    b"",
    b"{",
    b"}",
    b"[]",
    b"1",
    b"null",
    b"true",
    b'"x"',
    b"NaN",
    b"{}",
    b"\xff\xfe",
    b"\x00",
    b"{'a': 1}",
    b"[" * 999,
)


class WrongRequest(NamedTuple):
    """A request that must be refused, and the name of what is wrong with it."""

    name: str
    path: str
    body: bytes
    method: str = "POST"
    content_type: str = "application/json"


def wrong_requests() -> Iterator[WrongRequest]:
    """Yield one request of each kind."""
    for path, right in PATHS.items():
        for number, (field, value) in enumerate(_wrong_fields(path)):
            yield WrongRequest(f"{field} {number} of {path}", path, _raw({**right, field: value}))
        for field in right:
            if field != "max_tokens":
                yield WrongRequest(
                    f"{path} without {field}", path, _raw({k: v for k, v in right.items() if k != field})
                )
        whole = _raw(right)
        for length in range(1, len(whole)):
            yield WrongRequest(f"{length} bytes of {path}", path, whole[:length])
        for body in BODIES:
            yield WrongRequest(f"{body[:12]!r} to {path}", path, body)
        for kind in CONTENT_TYPES:
            yield WrongRequest(f"{kind} to {path}", path, whole, content_type=kind)
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            yield WrongRequest(f"{method} {path}", path, whole, method=method)
        for ending in ("x", "/1", "%00", "/x/", "s"):
            yield WrongRequest(f"{path}{ending}", f"{path}{ending}", whole)
    for path in NOWHERE:
        for method in ("GET", "POST", "PUT", "DELETE"):
            yield WrongRequest(f"{method} {path}", path, _raw(COMPLETION), method=method)


def _raw(body: Any) -> bytes:
    return json.dumps(body).encode()


def _wrong_fields(path: str) -> Iterator[tuple[str, Any]]:
    """Yield fields with values that they cannot have."""
    chat = "chat" in path
    for field in NUMBERS:
        yield from ((field, value) for value in NO_NUMBERS)
    for field in WHOLE:
        yield from ((field, value) for value in (*NO_NUMBERS, *NO_WHOLE_NUMBERS))
    yield from (("top_k", value) for value in (*NO_NUMBERS, *NO_WHOLE_NUMBERS) if value not in (1e300, 10**40))
    for field in ("stream", *(["logprobs"] if chat else ["echo"])):
        yield from ((field, value) for value in NO_TRUTHS)
    field = "top_logprobs" if chat else "logprobs"
    yield from ((field, value) for value in (*NO_NUMBERS, *NO_WHOLE_NUMBERS))
    yield from (("model", value) for value in (*NO_TEXTS, "", "other", "gpt-4", "toy ", "TOY", "../toy", "\u0000"))
    for field in UNSUPPORTED:
        yield from ((field, value) for value in ("x", 1, [{}], {"a": 1}, True))
    yield from ((field, 1) for field in UNKNOWN)
    yield from (("response_format", value) for value in (*FORMATS, *NO_OBJECTS))
    yield from (("stop", value) for value in (1, True, 0.5, {"a": 1}, [1], [None], ["a"] * 17, [["a"]], [{}], [True]))
    yield from (("logit_bias", value) for value in (*BIASES, *NO_OBJECTS))
    yield from (
        ("stream_options", value) for value in ({"other": 1}, {"include_usage": 1}, {"selfspec": "x"}, *NO_OBJECTS)
    )
    if chat:
        yield from (("messages", value) for value in MESSAGES)
        yield from (("modalities", value) for value in (["audio"], "text", 1, [1], {}, ["text", "audio"]))
        yield from (("max_completion_tokens", value) for value in (*NO_NUMBERS, *NO_WHOLE_NUMBERS, 1, 10**9))
    else:
        yield from (("prompt", value) for value in PROMPTS)
        yield from (("best_of", value) for value in (*NO_NUMBERS, *NO_WHOLE_NUMBERS, 2))
