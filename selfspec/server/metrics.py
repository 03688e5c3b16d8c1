"""Prometheus metrics: requests, tokens, drafted and accepted tokens, queue length and latencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as Counted
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from selfspec.server.request_state import Call
from selfspec.server.worker_pool import WorkerPool

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_COUNTS = {  # counters of `BatchCounters`, and their help texts
    "rounds": "verification passes",
    "tokens": "new tokens",
    "drafted": "drafted tokens that were verified",
    "accepted": "drafted tokens that were accepted",
    "reused": "prompt tokens found in the KV cache",
    "evicted": "preemptions: texts that lost their KV cache to make room and were prefilled again",
}


class Metrics:
    """The metrics of one server, in a separate Prometheus registry."""

    def __init__(self, pool: WorkerPool) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_PoolCollector(pool))
        self._mean = 1.0  # seconds of a request, an exponential moving average
        self.requests = Counted(
            "selfspec_requests", "requests by path and status", ["path", "status"], registry=self._registry
        )
        self.prompt_tokens = Counted("selfspec_prompt_tokens", "tokens of prompts", registry=self._registry)
        self._queue, self._first, self._token, self._duration = (
            Histogram(f"selfspec_{name}_seconds", help_text, buckets=buckets, registry=self._registry)
            for name, help_text, buckets in (
                ("queue", "from a request's arrival until its first text gets a cache row", _SECONDS),
                ("time_to_first_token", "from a request's arrival to its first token", _SECONDS),
                ("time_per_token", "seconds from first token to end, for each further token", _TOKEN_SECONDS),
                ("request", "from a request's arrival to its end", _SECONDS),
            )
        )

    @property
    def mean_seconds(self) -> float:
        """The mean seconds of a request: an exponential moving average over recent requests."""
        return self._mean

    def ended(self, call: Call) -> None:
        """Record the latencies and prompt tokens of a call that has ended."""
        times, duration = call.times, call.times.seconds
        self._mean += (duration - self._mean) / 8
        self.prompt_tokens.inc(call.parsed.prompt_tokens)
        self._duration.observe(duration)
        if times.admitted is not None:
            self._queue.observe(times.admitted - times.arrived)
        if times.first is not None:
            to_first = times.first - times.arrived
            self._first.observe(to_first)
            most = max(update.tokens for update in call.latest)
            if most > 1:
                self._token.observe((duration - to_first) / (most - 1))

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _PoolCollector:
    """Collector of the counts that the worker pool and its replicas keep, read at every scrape."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        """Yield each metric."""
        pool, counters = self._pool, [replica.batch.counters for replica in self._pool.replicas]
        for name, help_text in _COUNTS.items():
            yield CounterMetricFamily(f"selfspec_{name}", help_text, sum(getattr(counts, name) for counts in counters))
        by_source = _sum(dict(counts.by_source) for counts in counters)
        yield _labelled("selfspec_accepted_by_source", "accepted tokens by their source", "source", by_source)
        by_load = _sum(dict(counts.drafted_by_load) for counts in counters)
        yield _labelled("selfspec_drafted_by_load", "drafted tokens by the texts in the round", "running", by_load)
        yield GaugeMetricFamily("selfspec_running", "texts that are being decoded", pool.running)
        yield GaugeMetricFamily("selfspec_waiting", "texts that wait for a cache row", pool.waiting)
        yield GaugeMetricFamily(
            "selfspec_kv_slots", "slots of the KV cache", sum(replica.num_slots for replica in pool.replicas)
        )
        yield GaugeMetricFamily(
            "selfspec_kv_slots_free", "free slots of the KV cache", sum(replica.free for replica in pool.replicas)
        )


def _sum(parts: Iterable[Mapping[Any, int]]) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for part in parts:
        total.update(part)
    return total


def _labelled(name: str, help_text: str, label: str, counts: Mapping[Any, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for value, count in counts.items():
        family.add_metric([str(value)], count)
    return family
