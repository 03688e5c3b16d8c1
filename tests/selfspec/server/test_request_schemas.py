"""Wrong bodies: each gets a 4xx in the API's own form that names what is wrong; none a traceback, and none a row.

Errors of the server are one line that is safe to show.
"""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest
from amount import examples
from batches import ToyBatch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import service_of
from wants import needs

from selfspec.server.app import make_app
from selfspec.server.request_schemas import ChatBody, read_body, wrong

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
GOOD = {
    CHAT: {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    COMPLETION: {"model": "toy", "prompt": "Hi", "max_tokens": 2},
}


class App:
    """The app in this process: what is posted is answered at once, in one loop, and what was logged is kept."""

    def __init__(self, llm, loop):
        self.log = []
        self.batch = ToyBatch(llm, rows=4)
        self.service = service_of(llm, [self.batch], self.log, max_tokens=32, max_body=20_000)
        transport = httpx2.ASGITransport(make_app(self.service))
        self._client = httpx2.AsyncClient(transport=transport, base_url="http://toy")
        self._loop = loop

    def post(self, path, body, **headers):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        return self._loop.run_until_complete(self._client.post(path, content=raw, headers=headers))

    def close(self):
        self._loop.run_until_complete(self._client.aclose())


@pytest.fixture(scope="module")
def app(chatting):
    loop = asyncio.new_event_loop()
    made = App(chatting, loop)
    with made.service:
        yield made
        made.close()
    loop.close()


def check_refused(answer, status=400):
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 600
    return error


def chat(**fields):
    return CHAT, {**GOOD[CHAT], **fields}


def completion(**fields):
    return COMPLETION, {**GOOD[COMPLETION], **fields}


def user(**fields):
    return chat(messages=[{"role": "user", **fields}])


WRONG = {
    "no prompt": ((COMPLETION, {"model": "toy"}), "prompt", "prompt is missing"),
    "no messages": ((CHAT, {"model": "toy"}), "messages", "messages is missing"),
    "no model": ((COMPLETION, {"prompt": "Hi"}), "model", "model is missing"),
    "an empty prompt": (completion(prompt=""), "prompt", "the prompt is empty"),
    "no prompts": (completion(prompt=[]), "prompt", "expected a text, token ids"),
    "a number as prompt": (completion(prompt=7), "prompt", "expected a text, token ids"),
    "mixed prompts": (completion(prompt=["a", 7]), "prompt", "expected a text, token ids"),
    "a prompt that is true": (completion(prompt=[True]), "prompt", "expected a text, token ids"),
    "an unknown token": (completion(prompt=[10**9]), "prompt", "is not in the model's vocabulary"),
    "a negative token": (completion(prompt=[-1]), "prompt", "is not in the model's vocabulary"),
    "a prompt that fills the context": (completion(prompt=[5] * 1025), "prompt", "expected at most 1024"),
    "more than the context leaves": (completion(prompt=[5] * 1000, max_tokens=30), "max_tokens", "at most 25 new ones"),
    "more than is served": (completion(max_tokens=33), "max_tokens", "expected at most 32 new tokens"),
    "no tokens": (completion(max_tokens=0), "max_tokens", "0 without echo; expected 1 or more"),
    "tokens in words": (completion(max_tokens="2"), "max_tokens", "valid integer"),
    "half a token": (completion(max_tokens=2.5), "max_tokens", "valid integer"),
    "two limits": (chat(max_completion_tokens=3), "max_completion_tokens", "contradict"),
    "heat": (completion(temperature=2.5), "temperature", "less than or equal to 2"),
    "cold": (completion(temperature=-1), "temperature", "greater than or equal to 0"),
    "a negative top_p": (completion(top_p=-0.1), "top_p", "greater than or equal to 0"),
    "a penalty": (completion(presence_penalty=3), "presence_penalty", "less than or equal to 2"),
    "no texts": (completion(n=0), "n", "greater than or equal to 1"),
    "too many texts": (completion(n=129), "n", "less than or equal to 128"),
    "more texts than ever fit": (completion(n=128), "n", "at most 68 texts"),
    "a negative seed": (completion(seed=-2), "seed", "greater than or equal to 0"),
    "a huge seed": (completion(seed=2**63), "seed", "less than"),
    "a number to stop at": (completion(stop=[3]), "stop", "expected a text"),
    "many stops": (completion(stop=["x"] * 17), "stop", "at most 16"),
    "stream in words": (completion(stream="yes"), "stream", "valid boolean"),
    "options of no stream": (completion(stream_options={"include_usage": True}), "stream_options", "stream: true"),
    "an unknown field": (completion(colour="red"), "colour", "no such field"),
    "another library's name": (completion(max_new_tokens=3), "max_new_tokens", "did you mean max_tokens?"),
    "an unknown inner field": (
        completion(stream=True, stream_options={"a": 1}),
        "stream_options.a",
        "no such field",
    ),
    "tools": (chat(tools=[{"type": "function"}]), "tools", "not served"),
    "functions": (chat(functions=[{}]), "functions", "not served"),
    "audio": (chat(audio={"voice": "x"}), "audio", "not served"),
    "sound": (chat(modalities=["text", "audio"]), "modalities.1", "'text'"),
    "a suffix": (completion(suffix="end"), "suffix", "not served"),
    "best_of": (completion(best_of=3), "best_of", "not served"),
    "too many logprobs": (completion(logprobs=21), "logprobs", "less than or equal to 20"),
    "top without logprobs": (chat(top_logprobs=2), "top_logprobs", "logprobs: true"),
    "a bias on no token": (completion(logit_bias={"x": 1}), "logit_bias", "token ids"),
    "a bias on an unknown token": (completion(logit_bias={"99999": 1}), "logit_bias", "not in the vocabulary"),
    "a bias too strong": (completion(logit_bias={"5": 101}), "logit_bias.5", "less than or equal to 100"),
    "no message": (chat(messages=[]), "messages", "empty"),
    "messages in words": (chat(messages="Hi"), "messages", "valid list"),
    "a message in words": (chat(messages=["Hi"]), "messages[0]", "expected an object"),
    "no role": (chat(messages=[{"content": "Hi"}]), "messages[0].role", "expected one of"),
    "a tool's message": (chat(messages=[{"role": "tool", "content": "Hi"}]), "messages[0].role", "expected one of"),
    "no content": (user(), "messages[0].content", "expected a text"),
    "an image": (user(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content", "type 'text'"),
    "a call in a message": (user(content="Hi", tool_calls=[{}]), "messages[0].tool_calls", "not served"),
    "an unknown format": (chat(response_format={"type": "yaml"}), "response_format.type", "'json_schema'"),
    "a schema without one": (chat(response_format={"type": "json_schema"}), "response_format", "json_schema: expected"),
}


@pytest.mark.parametrize(("asked", "param", "said"), WRONG.values(), ids=WRONG)
def test_wrong_fields_are_named(app, asked, param, said):
    error = check_refused(app.post(*asked))
    assert error["param"] == param
    assert said in error["message"]


def test_nulls_in_objects_are_as_if_left_out():
    body = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    body |= {"stream_options": {"include_usage": None, "selfspec": True}}
    body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": None, "strict": None}}}
    read = read_body(ChatBody, json.dumps(body).encode())
    assert (read.stream_options.include_usage, read.stream_options.selfspec) == (False, True)
    assert read.response_format.schema_text == {"type": "object"}
    kept = {"name": "a", "schema": {"enum": [None], "default": None}}
    body["response_format"]["json_schema"] = kept
    assert read_body(ChatBody, json.dumps(body).encode()).response_format.schema_text == kept["schema"]


@needs("llguidance", "llguidance")
def test_a_wrong_schema_is_told(app):
    schema = {"name": "a", "schema": {"type": "nothing"}}
    error = check_refused(app.post(*chat(response_format={"type": "json_schema", "json_schema": schema})))
    assert error["param"] == "response_format"


def test_without_llguidance_it_is_told(app, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    error = check_refused(app.post(*chat(response_format={"type": "json_object"})))
    assert "pip install llguidance" in error["message"]


RAW = {
    "nothing": b"",
    "half": b'{"model": "toy", "prompt": ',
    "a list": b"[]",
    "null": b"null",
    "a word": b"hello",
    "not UTF-8": b'{"model": "\xff"}',
    "half a surrogate pair": b'{"model": "toy", "prompt": "\\ud800"}',
    "not a number": b'{"model": "toy", "prompt": "x", "temperature": NaN}',
    "infinite": b'{"model": "toy", "prompt": "x", "temperature": 1e999}',
    "deep": b"[" * 9000,
    "deep inside": b'{"model": "toy", "prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}",
    "a huge number": b'{"model": "toy", "prompt": "x", "max_tokens": ' + b"9" * 9000 + b"}",
    "a huge name": b'{"model": "' + b"m" * 9000 + b'", "prompt": "x"}',
    "a huge field": b'{"model": "toy", "prompt": "x", "' + b"f" * 9000 + b'": 1}',
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_what_is_no_body_is_told(app, raw):
    answer = app.post(COMPLETION, raw)
    check_refused(answer, 404 if b"mmm" in raw else 400)


def test_a_body_must_be_json_and_of_a_size(app):
    check_refused(app.post(COMPLETION, GOOD[COMPLETION], **{"content-type": "text/plain"}), 415)
    check_refused(app.post(COMPLETION, {"model": "toy", "prompt": "x" * 20_000}), 413)


FIELDS = (
    *("model", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"),
    *("stream", "stream_options", "response_format", "messages", "prompt", "echo", "best_of", "suffix", "user"),
    *("tools", "tool_choice", "modalities"),
)
TEXTS = st.text(max_size=20) | st.sampled_from(["toy", "user"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "schema", "1"]) | st.text(max_size=5), inner
        )
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), VALUES, max_size=4)


ODD = [None, True, False, 0, 1, -1, 2.5, 1e308, -1e308, float("nan"), float("inf"), 10**30, -(2**63), "", "x", "1"]
ODD += ["\0", "\ud800", "\U0001f600", [], [[]], [None], [1, "x"], {}, {"": ""}, {"type": "text"}, [{}], "x" * 5000]
ODD += [{"type": "json_schema", "json_schema": {"schema": {}}}, [{"role": "user", "content": []}]]


@pytest.mark.parametrize("field", FIELDS)
def test_no_value_of_a_field_breaks_anything(app, field):
    for path in (CHAT, COMPLETION):
        for value in ODD:
            check_answered(app, path, {**GOOD[path], field: value})


@settings(max_examples=examples(120), suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from([CHAT, COMPLETION]), body=BODIES, based=st.booleans())
def test_no_body_breaks_anything(app, path, body, based):
    check_answered(app, path, {**GOOD[path], **body} if based else body)


def check_answered(app, path, body):
    """A body is served or refused; nothing is left behind."""
    answer = app.post(path, json.dumps(body).encode())  # NaN, half surrogate pairs and all
    if answer.status_code != 200:
        assert answer.status_code in (400, 404, 413)
        check_refused(answer, answer.status_code)
    elif answer.headers["content-type"] == "application/json":
        assert answer.json()["choices"]
    else:
        assert answer.text.endswith("data: [DONE]\n\n")
    assert app.service.idle
    assert app.batch.free == app.batch.num_slots


def test_a_message_has_no_control_characters():
    """A client prints what a request quoted."""
    assert wrong("the model '\x1b[31m\x00\n' does not exist").message == "the model '␛[31m␀ ' does not exist"
