"""A thousand kinds of wrong requests get one clear error each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from batches import ToyBatch
from servers import served
from wrong_requests import wrong_requests

WRONG = list(wrong_requests())


def refused(client, url, wrong):
    """Fail unless a request gets an error of one line."""
    headers = {"content-type": wrong.content_type}
    answer = client.request(wrong.method, url + wrong.path, content=wrong.body, headers=headers)
    assert 400 <= answer.status_code < 500, wrong
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, wrong
    assert error["type"] == "invalid_request_error", wrong
    assert 0 < len(error["message"]) <= 500, wrong
    assert error["message"].isprintable(), wrong


def test_there_are_a_thousand_kinds():
    assert len({wrong[1:] for wrong in WRONG}) >= 1000


def test_each_gets_one_clear_error(toy):
    with httpx2.Client(timeout=60) as client:
        for wrong in WRONG[::11]:
            refused(client, toy.url, wrong)


@pytest.mark.long("servers under attack")
def test_ten_thousand_at_once(chatting):
    batch = ToyBatch(chatting, rows=4)
    with (
        served(chatting, batch) as one,
        httpx2.Client(timeout=60) as client,
        ThreadPoolExecutor(8) as all_at_once,
    ):
        for done in [all_at_once.submit(refused, client, one.url, wrong) for wrong in WRONG * 10]:
            done.result()
        assert client.get(f"{one.url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    assert batch.free == batch.num_slots
