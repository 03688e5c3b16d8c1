"""What Prometheus reads."""

from __future__ import annotations

import httpx2
import pytest
from batches import ToyBatch
from prometheus_client.parser import text_string_to_metric_families
from servers import served, until

BODY = {"model": "toy", "prompt": "def main(args):", "max_tokens": 10}


@pytest.fixture
def one(chatting):
    with served(chatting, ToyBatch(chatting), ToyBatch(chatting)) as made:
        yield made


def figures(one):
    answer = httpx2.get(f"{one.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = (sample for family in text_string_to_metric_families(answer.text) for sample in family.samples)
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_everything_is_counted(one, chatting):
    before = figures(one)
    assert before["selfspec_tokens_total",] == 0
    assert before["selfspec_running",] == before["selfspec_waiting",] == 0
    for body, status in ((BODY, 200), ({**BODY, "n": 2}, 200), ({**BODY, "n": 0}, 400)):
        assert httpx2.post(f"{one.url}/v1/completions", json=body).status_code == status
    httpx2.get(f"{one.url}/nowhere/{'x' * 50}")
    until(lambda: len(one.log) == 4)
    after = figures(one)
    assert after["selfspec_tokens_total",] == 30
    assert after["selfspec_prompt_tokens_total",] == 2 * len(chatting.encode(BODY["prompt"]))
    assert after["selfspec_rounds_total",] >= 20
    assert after["selfspec_accepted_total",] == after["selfspec_drafted_total",] == 30
    assert after["selfspec_accepted_by_source_total", "draft path"] == 30
    assert sum(n for (name, *_), n in after.items() if name == "selfspec_drafted_by_load_total") == 30
    assert after["selfspec_requests_total", "/v1/completions", "200"] == 2
    assert after["selfspec_requests_total", "/v1/completions", "400"] == 1
    assert after["selfspec_requests_total", "other", "404"] == 1, "not a name for each path that is tried"
    assert after["selfspec_kv_slots",] == after["selfspec_kv_slots_free",] == 2 * one.batches[0].num_slots


def test_latencies_are_histograms(one):
    for _ in range(3):
        httpx2.post(f"{one.url}/v1/completions", json=BODY)
    until(lambda: figures(one)["selfspec_request_seconds_count",] == 3)
    found = figures(one)
    for name in ("queue", "time_to_first_token", "time_per_token", "request"):
        assert found[f"selfspec_{name}_seconds_count",] == 3
        assert found[f"selfspec_{name}_seconds_bucket", "+Inf"] == 3
        assert found[f"selfspec_{name}_seconds_sum",] > 0
    whole, first = found["selfspec_request_seconds_sum",], found["selfspec_time_to_first_token_seconds_sum",]
    assert whole > first > found["selfspec_queue_seconds_sum",]


def test_each_server_has_figures_of_its_own(one, chatting):
    httpx2.post(f"{one.url}/v1/completions", json=BODY)
    with served(chatting, ToyBatch(chatting)) as other:
        assert figures(other)["selfspec_tokens_total",] == 0
