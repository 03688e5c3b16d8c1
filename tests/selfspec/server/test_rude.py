"""200 clients that send half a request, nonsense, or vanish, among others that ask properly."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from batches import ToyBatch, continued
from rude import misbehave
from servers import served, until

PROMPTS = ["import os", "class Parser:", "def main(args):", "while True:"]
RUDE, ASKED = 200, 40


@pytest.mark.long("servers under attack")
def test_rude_clients_leave_nothing_behind(chatting, caplog, capfd):
    expected = {
        prompt: chatting.tokenizer.decode(continued(chatting.encode(prompt), 30), skip_special_tokens=True)
        for prompt in PROMPTS
    }
    batch = ToyBatch(chatting, rows=4, seconds=0.001)
    with served(chatting, batch, queue=1000) as one, httpx2.Client(timeout=60) as client:

        def ask(number):
            prompt = PROMPTS[number % len(PROMPTS)]
            body = {"model": "toy", "prompt": prompt, "max_tokens": 30}
            return prompt, client.post(f"{one.url}/v1/completions", json=body).json()["choices"][0]["text"]

        def crowd():
            with ThreadPoolExecutor(16) as all_at_once:
                rude = [all_at_once.submit(misbehave, one.port, number) for number in range(RUDE)]
                asked = [all_at_once.submit(ask, number) for number in range(ASKED)]
                assert all(prompt_text[1] == expected[prompt_text[0]] for prompt_text in (a.result() for a in asked))
                for each in rude:
                    each.result()
            until(lambda: one.service.idle and len(one.server.server_state.connections) <= 16)
            one.log.clear()
            gc.collect()

        crowd()
        threads = threading.active_count()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        crowd()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert grown < 1_000_000, "bytes that a second crowd left behind"
        assert threading.active_count() <= threads
        assert batch.free == batch.num_slots
        assert not batch.running
        assert not batch.waiting
        assert ask(0)[1] == expected[PROMPTS[0]]
        assert client.get(f"{one.url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    assert "Traceback" not in caplog.text
    assert "Traceback" not in capfd.readouterr().err
