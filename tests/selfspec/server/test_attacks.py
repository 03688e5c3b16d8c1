"""Clients that ask for more than anyone needs: each gets an answer or is closed, and others are answered meanwhile."""

from __future__ import annotations

import json
import socket
import threading
from types import SimpleNamespace

import httpx2
import pytest
from batches import ToyBatch
from rude import request
from servers import served, until
from wants import needs

from selfspec.cli.serve import _hosts
from selfspec.server.middleware import log_line
from selfspec.server.protocol import Settings, backlog, limited_protocol
from selfspec.server.request_parser import CHARACTERS

BODY = {"model": "toy", "prompt": "def main(args):", "max_tokens": 4}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest.fixture
def serve(chatting):
    """Starts servers of one toy batch."""

    def start(seconds=0.0, **settings):
        return served(chatting, ToyBatch(chatting, rows=4, seconds=seconds), **settings)

    return start


def post(one, body=BODY, path="/v1/completions", **headers):
    return httpx2.post(f"{one.url}{path}", json=body, headers=headers, timeout=60)


def wrong(answer, status=400):
    assert answer.status_code == status
    return answer.json()["error"]["message"]


def send(one, raw):
    client = socket.create_connection(("127.0.0.1", one.port), timeout=60)
    client.sendall(raw)
    return client


@pytest.mark.parametrize(
    "body", [{**BODY, "prompt": ["x"] * 40_000}, {**BODY, "prompt": ["x"] * 20_000, "n": 128}], ids=["prompts", "and n"]
)
def test_texts_are_counted_before_prompts_are_read(toy, monkeypatch, body):
    monkeypatch.setattr(toy.service.reader, "_encode", lambda *_: pytest.fail("a prompt was read"))
    assert wrong(post(toy, body)) == f"{len(body['prompt']) * body.get('n', 1)} texts (n for each prompt); " + (
        "expected at most 68 texts"
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_long_prompts_are_not_tokenised(toy, monkeypatch, path):
    most = CHARACTERS * toy.service.reader.max_model_len
    content = "x" * (most // 2 + 1)
    messages = [{"role": "user", "content": content}, {"role": "user", "content": content}]
    body = {**BODY, "prompt": "x" * (most + 2)} if path == "/v1/completions" else {**CHAT, "messages": messages}
    monkeypatch.setattr(toy.service.reader, "_encode", lambda *_: pytest.fail("a prompt was read"))
    assert f"the prompt has {most + 2} characters or token ids; expected at most {most}" == wrong(post(toy, body, path))


def slow_parser(one, monkeypatch, name):
    """Make a method of the parser wait; return the events that it has begun, and that it may go on."""
    begun, go_on = threading.Event(), threading.Event()
    method = getattr(one.service.reader, name)

    def waits(*args):
        begun.set()
        assert go_on.wait(60)
        return method(*args)

    monkeypatch.setattr(one.service.reader, name, waits)
    return begun, go_on


def test_a_guide_in_the_making_holds_nobody_up(serve, monkeypatch):
    with serve() as one:
        begun, go_on = slow_parser(one, monkeypatch, "guide")
        with send(one, request("x", response_format={"type": "text"})) as client:
            assert begun.wait(60)
            assert post(one).status_code == 200
            go_on.set()
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_leaves_while_its_prompt_is_read(serve, monkeypatch):
    with serve() as one:
        begun, go_on = slow_parser(one, monkeypatch, "completion")
        with send(one, request("x")):
            assert begun.wait(60)
        until(lambda: one.log)
        go_on.set()
        assert (one.log[0]["status"], one.service.idle) == (499, True)


def test_time_that_is_up_while_a_prompt_is_read(serve, monkeypatch):
    with serve(timeout=0.05) as one:
        _, go_on = slow_parser(one, monkeypatch, "completion")
        assert "timed out" in wrong(post(one), 504)
        go_on.set()


@needs("llguidance", "llguidance")
def test_a_schema_that_was_refused_is_not_checked_again(serve, monkeypatch):
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "integer", "required": ["x"] * 3000}},
    }
    with serve() as one:
        first = wrong(post(one, {**BODY, "response_format": schema}))
        monkeypatch.setattr(
            "selfspec.text.grammar.subprocess.run", lambda *_, **__: pytest.fail("it was checked again")
        )
        assert first == wrong(post(one, {**BODY, "response_format": schema}))
        assert "3000 property names are too many" in first


def test_bodies_in_flight_are_bounded(serve):
    with serve(max_body=100) as one:  # sixteen of these at a time
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        )
        waiting = [send(one, head + b" " * 99) for _ in range(16)]
        until(lambda: one.service._bodies._left == 16)
        assert "too large together" in wrong(post(one), 429)
        for client in waiting:
            client.close()
        until(lambda: one.service._bodies._left == 1600)
        assert wrong(post(one, {"model": "toy"})) == "prompt is missing"


def test_connections_are_capped(serve):
    with serve(connections=3) as one:
        idle = [send(one, b"") for _ in range(3)]
        until(lambda: len(one.server.server_state.connections) == 3)
        with send(one, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") as late:
            assert late.recv(4096).startswith(b"HTTP/1.1 503 ")
        for client in idle:
            client.close()
        until(lambda: not one.server.server_state.connections)
        assert post(one).status_code == 200


def test_connections_leave_descriptors_for_the_rest(monkeypatch):
    monkeypatch.setattr("selfspec.server.protocol._max_files", lambda: 256)
    assert limited_protocol(Settings(names=("toy",))).connections_limit == 128
    assert limited_protocol(Settings(names=("toy",), connections=5)).connections_limit == 5
    assert backlog() == 16


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_who_does_not_read_an_answer_is_closed(serve, monkeypatch, stream):
    monkeypatch.setattr("selfspec.server.responses.LAST", 0.1)
    with serve(timeout=1.0) as one:
        listening = one.server.servers[0].sockets[0]
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", one.port))
        with client:
            client.sendall(request("x = ", max_tokens=900, stream=stream, logprobs=2, n=4))
            until(lambda: one.server.server_state.connections)
            until(lambda: not one.server.server_state.connections)
            assert one.service.idle


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 200), ("LocalHost", 200), ("127.0.0.1", 200), ("[::1]:80", 200)]
    + [(name, 421) for name in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil", "")],
)
def test_only_this_machines_names_are_answered_without_a_key(toy, serve, host, status):
    command = SimpleNamespace(api_key=None, host="localhost")
    with serve(hosts=_hosts(command, "127.0.0.1")) as one:
        assert httpx2.get(f"{one.url}/health", headers={"host": host}).status_code == status
        assert post(one, host=host).status_code == status


def test_with_a_key_or_to_the_network_any_name_is_answered():
    assert _hosts(SimpleNamespace(api_key="k", host="localhost"), "127.0.0.1") == ()
    assert _hosts(SimpleNamespace(api_key=None, host="0.0.0.0"), "0.0.0.0") == ()
    assert "mine.test" in _hosts(SimpleNamespace(api_key=None, host="mine.test"), "127.0.0.1")


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/V1/models", "/./v1/models", "/x/../v1/models", "/%76%31/models", "/v1%2fmodels", "/;/v1/models"],
)
def test_no_spelling_of_a_path_goes_without_a_key(serve, path):
    with serve(api_key="secret") as one, send(one, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()) as client:
        assert client.recv(4096).split()[1] in (b"401", b"404")


@pytest.mark.parametrize("length", ["1000000000", "9" * 400])
def test_a_declared_length_is_believed(toy, length):
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with send(toy, f"{head}Content-Length: {length}\r\n\r\n".encode()) as client:
        assert client.recv(4096).split()[1] in (b"413", b"400")


def test_endless_chunks(serve):
    with serve(max_body=1000) as one:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with send(one, head + b"Transfer-Encoding: chunked\r\n\r\n" + b"64\r\n" + b" " * 100 + b"\r\n") as client:
            for _ in range(10):
                client.sendall(b"64\r\n" + b" " * 100 + b"\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["x"] * 100_000}, "expected at most 16 texts, got 100000"),
        ({"logit_bias": {str(n): 1 for n in range(200_000)}}, "token 4096 is not in the vocabulary of 4096"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty: Input should be greater than or equal to 0.01"),
    ],
    ids=["stops", "biases", "a tiny penalty"],
)
def test_too_much_of_a_field(toy, fields, message):
    assert wrong(post(toy, {**BODY, **fields})) == message


def test_more_posts_than_places_get_429_and_memory_is_returned(serve):
    with serve(seconds=0.01, rows=1, queue=2) as one:
        clients = [send(one, request("x", max_tokens=300)) for _ in range(12)]
        until(lambda: sum(line["status"] == 429 for line in one.log) == 9)
        for client in clients:
            client.close()
        until(lambda: one.service.idle and not one.server.server_state.connections)
        assert one.batches[0].free == one.batches[0].num_slots
        assert post(one).status_code == 200


def test_the_log_is_plain_and_short(serve, capsys):
    with serve() as one:
        httpx2.get(f"{one.url}/%1b%5b31m%c2%9b%e2%80%ae" + "a" * 5000)
    log_line(one.log[0])
    line = capsys.readouterr().err
    assert len(line) < 500
    assert line.isascii()
    assert line.removesuffix("\n").isprintable()
    assert json.loads(line)["path"] == ("/\x1b[31m\x9b\u202e" + "a" * 5000)[:200]
