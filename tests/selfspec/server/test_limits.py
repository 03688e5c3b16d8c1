"""Keys, sizes, queues, times and ends: what a server allows, and what it says to those who ask for more."""

from __future__ import annotations

import json
import signal
import socket
import threading

import httpx2
import openai
import pytest
from batches import ToyBatch, continued
from servers import served, service_of, until

from selfspec.basics.errors import SelfspecError
from selfspec.server import worker_pool

PROMPT = "def main(args):"
BODY = {"model": "toy", "prompt": PROMPT, "max_tokens": 4}


@pytest.fixture
def serve(chatting):
    """Starts servers: of one toy batch, a step of which takes so many seconds."""

    def start(seconds=0.0, rows=4, **settings):
        return served(chatting, ToyBatch(chatting, rows=rows, seconds=seconds), rows=rows, **settings)

    return start


def post(one, body=BODY, *, path="/v1/completions", **headers):
    return httpx2.post(f"{one.url}{path}", json=body, headers=headers, timeout=60)


def in_background(one, body, found):
    thread = threading.Thread(target=lambda: found.append(post(one, body)))
    thread.start()
    return thread


def long(**fields):
    return {**BODY, "max_tokens": 900, **fields}


def test_a_key(serve):
    with serve(api_key="secret") as one:
        for wrong in ({}, {"authorization": "Bearer nothing"}, {"authorization": "secret"}):
            refused = post(one, **wrong)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert "secret" not in refused.text
            assert httpx2.get(f"{one.url}/v1/models", headers=wrong).status_code == 401
        for right in ("Bearer secret", "bearer secret", "BEARER  secret"):
            assert post(one, authorization=right).status_code == 200
        with openai.OpenAI(base_url=f"{one.url}/v1", api_key="secret") as client:
            assert client.models.list().data[0].id == "toy"
        assert [httpx2.get(f"{one.url}{path}").status_code for path in ("/health", "/metrics", "/")] == [200] * 3
        assert "secret" not in json.dumps(one.log)


def test_paths_and_methods(toy):
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/embeddings", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("DELETE", "/", 405),
    ):
        answer = httpx2.request(method, f"{toy.url}{path}")
        assert answer.status_code == status
        assert "served: POST /v1/chat/completions" in answer.json()["error"]["message"]


def test_large_bodies(serve):
    with serve(max_body=1000) as one:
        assert post(one, {**BODY, "prompt": "x" * 1000}).status_code == 413

        def parts():
            for _ in range(20):
                yield b" " * 100

        headers = {"content-type": "application/json"}
        answer = httpx2.post(f"{one.url}/v1/completions", content=parts(), headers=headers)
        assert answer.status_code == 413, "its length was not told before"
        assert post(one).status_code == 200


def test_a_full_queue_says_when_to_come_back(serve):
    found = []
    with serve(seconds=0.003, rows=1, queue=2) as one:
        threads = [in_background(one, {**BODY, "max_tokens": 300}, found)]
        until(lambda: one.service.pool.running == 1)
        threads += [in_background(one, BODY, found) for _ in range(2)]
        until(lambda: one.service.pool.waiting == 2)
        refused = post(one)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert post(one, {**BODY, "n": 4}).status_code == 400, "which never fits"
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in found] == [200] * 3
        assert post(one).status_code == 200


def test_time_that_is_up(serve, chatting):
    found = []
    with serve(seconds=0.005, rows=1, timeout=1.5) as one:
        thread = in_background(one, long(), found)
        until(lambda: one.service.pool.running == 1)
        waited = post(one)
        thread.join()
        cut = found[0].json()
        assert cut["choices"][0]["finish_reason"] == "length"
        tokens = cut["usage"]["completion_tokens"]
        assert 0 < tokens < 900
        whole = chatting.tokenizer.decode(continued(chatting.encode(PROMPT), tokens))
        assert whole.startswith(cut["choices"][0]["text"]), "what there was by then"
        assert waited.status_code in (200, 504), "it came a moment later, so the row may have been free just in time"
        assert one.service.idle
        assert one.log[0]["finish"] == "time"


def test_time_that_is_up_before_a_text_began(chatting):
    with served(chatting, ToyBatch(chatting, seconds=0.01, reads=1000), timeout=0.05) as one:
        whole, stream = (post(one, {**BODY, "stream": stream}) for stream in (False, True))
        assert (whole.status_code, stream.status_code) == (504, 200)  # a stream's head is sent at once
        event = json.loads(stream.text.split("\n")[0].removeprefix("data: "))
        assert event["error"]["code"] == whole.json()["error"]["code"] == "timeout"


def test_a_body_that_does_not_come(serve):
    with serve(reading=0.2) as one, socket.create_connection(("127.0.0.1", one.port)) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        slow.sendall(b'Content-Length: 99\r\n\r\n{"model"')
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("head", [b"", b"POST /v1/completions HTTP/1.1\r\nHost:"], ids=["none", "half"])
def test_a_head_that_does_not_come(serve, head):
    with serve(reading=1.0) as one, socket.create_connection(("127.0.0.1", one.port)) as slow:
        slow.sendall(head)
        slow.settimeout(60)
        assert slow.recv(4096) == b"", "closed"
        with httpx2.Client() as client:  # and one that has asked before
            assert client.get(f"{one.url}/health").status_code == 200
            assert post(one).status_code == 200


def test_a_slow_client_of_a_long_text_is_not_closed(serve):
    with serve(seconds=0.03, reading=1.0) as one:
        assert post(one, {**BODY, "max_tokens": 50}).json()["usage"]["completion_tokens"] == 50


def test_ending_lets_running_texts_end(serve):
    found = []
    with serve(seconds=0.005) as one:
        thread = in_background(one, {**BODY, "max_tokens": 300}, found)
        until(lambda: one.service.pool.running == 1)
        one.server.end()
        refused = post(one)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        health = httpx2.get(f"{one.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "ending")
        thread.join()
        assert found[0].json()["usage"]["completion_tokens"] == 300
        until(lambda: one.server.should_exit)


def test_ending_waits_no_longer_than_its_grace(serve):
    found = []
    with serve(seconds=0.02, rows=1, grace=0.1) as one:
        threads = [in_background(one, long(), found)]
        until(lambda: one.service.pool.running == 1)
        threads.append(in_background(one, long(), found))
        until(lambda: one.service.pool.waiting == 1 and one.batches[0].counters.tokens)
        one.server.end()
        for thread in threads:
            thread.join()
        assert sorted(answer.status_code for answer in found) == [200, 503]
        cut = next(answer for answer in found if answer.status_code == 200).json()
        assert 0 < cut["usage"]["completion_tokens"] < 900
        until(lambda: one.server.should_exit)


def test_told_twice_it_ends_at_once(serve):
    found = []
    with serve(seconds=0.02, grace=1000) as one:
        thread = in_background(one, long(), found)
        until(lambda: one.batches[0].counters.tokens)
        one.server.handle_exit(signal.SIGINT, None)
        assert post(one).status_code == 503
        assert not one.server.should_exit
        one.server.handle_exit(signal.SIGINT, None)
        thread.join()
        assert found[0].json()["usage"]["completion_tokens"] < 900
        until(lambda: one.server.should_exit)


def test_a_client_that_goes_away_frees_its_row(serve):
    with serve(seconds=0.005, rows=1) as one:
        for stream in (True, False):
            with socket.create_connection(("127.0.0.1", one.port)) as client:
                raw = json.dumps(long(stream=stream)).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
                client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)
                until(lambda: one.service.pool.running == 1)
            until(lambda: one.service.idle)
            assert one.batches[0].free == one.batches[0].num_slots
        until(lambda: len(one.log) == 2)
        assert {line["finish"] for line in one.log} == {"the client is gone"}
        assert one.log[1]["status"] == 499
        assert max(line["tokens"] for line in one.log) < 900
        assert post(one).status_code == 200


def test_a_client_that_goes_away_leaves_the_queue(serve):
    found = []
    with serve(seconds=0.005, rows=1) as one:
        thread = in_background(one, {**BODY, "max_tokens": 300}, found)
        until(lambda: one.service.pool.running == 1)
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(f"{one.url}/v1/completions", json=BODY, timeout=0.1)
        until(lambda: one.service.pool.waiting == 0)
        assert one.batches[0].most == 1
        thread.join()
        assert one.batches[0].counters.tokens == 300, "nothing was decoded for who had gone"


def test_what_fails_is_told_and_others_go_on(chatting, caplog):
    bad = chatting.encode("class")[-1]
    batch = ToyBatch(chatting, rows=4, fails=bad)
    with served(chatting, batch) as one:
        for stream in (False, True):
            failed = post(one, {**BODY, "prompt": [bad], "stream": stream})
            assert failed.status_code == (200 if stream else 500)
            event = failed.text.split("\n")[0].removeprefix("data: ")
            assert json.loads(event)["error"]["type"] == "server_error"
            until(lambda: len(one.log) == 1 + stream)
            assert one.log[-1]["error"] == json.loads(event)["error"]["message"]
        assert post(one).status_code == 200
        assert batch.free == batch.num_slots
        assert "a toy's failure" in caplog.text, "the log says how"


def test_what_the_pool_never_holds_is_refused(toy):
    answer = post(toy, {**BODY, "prompt": [5] * 600})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "a prompt of 600 tokens never fits")


def test_a_replica_that_cannot_begin_is_told(chatting):
    class Broken(ToyBatch):
        def __enter__(self):
            raise SelfspecError("no memory for one row")

    service = service_of(chatting, [ToyBatch(chatting), Broken(chatting)], [])
    with pytest.raises(SelfspecError, match="no memory for one row"), service:
        pass
    assert not service.pool.alive


def test_pages_of_other_origins(serve):
    """Off by default; a preflight request needs no key, and only named origins get an answer that browsers take."""
    preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
    with serve(api_key="secret", cors_origins=("https://app.example",)) as one:
        url = f"{one.url}/v1/chat/completions"
        allowed = httpx2.options(url, headers=preflight | {"access-control-request-headers": "authorization"})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        answer = post(one, authorization="Bearer secret", origin="https://app.example")
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        other = httpx2.options(url, headers={**preflight, "origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
    with serve(api_key="secret") as one:
        refused = httpx2.options(f"{one.url}/v1/models", headers=preflight)
        assert refused.status_code == 405
        assert "access-control-allow-origin" not in refused.headers


def test_freed_memory_returns_to_the_system_while_requests_run(serve, monkeypatch):
    trimmed = []
    monkeypatch.setattr(worker_pool, "release_memory", lambda: trimmed.append(threading.current_thread().name))
    for often in ("TRIM_SECONDS", "IDLE_SECONDS"):  # while texts run, and when the last has ended
        for name in ("TRIM_SECONDS", "IDLE_SECONDS"):
            monkeypatch.setattr(worker_pool, name, float("inf"))
        with serve() as one:
            assert post(one).status_code == 200
            assert not trimmed
            monkeypatch.setattr(worker_pool, often, 0)
            assert post(one).status_code == 200
            until(lambda: trimmed)
        assert set(trimmed) == {"replica"}
        trimmed.clear()


def test_a_request_that_is_being_parsed_is_answered_before_the_end(serve, monkeypatch):
    found, begun, going_on = [], threading.Event(), threading.Event()
    with serve(grace=30) as one:
        completion = one.service.reader.completion

        def slow(body, guide):
            begun.set()
            assert going_on.wait(60)
            return completion(body, guide)

        monkeypatch.setattr(one.service.reader, "completion", slow)
        thread = in_background(one, BODY, found)
        assert begun.wait(60)
        assert not one.service.idle
        one.server.end()
        going_on.set()
        thread.join()
        assert found[0].status_code == 200
        assert one.service.idle


def test_a_request_that_is_parsed_too_late_gets_an_error(serve, monkeypatch):
    with serve() as one:
        completion = one.service.reader.completion

        def late(body, guide):
            one.service.ended = True
            return completion(body, guide)

        monkeypatch.setattr(one.service.reader, "completion", late)
        answer = post(one)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the server is ending"
