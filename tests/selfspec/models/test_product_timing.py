"""Seconds of products, by the host's clock or from graph replays."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import fake_cuda as fake_cuda

from selfspec.models import product_timing
from selfspec.models.product_timing import seconds_of


def test_on_a_cpu_the_clock_is_read_around_all_calls(monkeypatch):
    now = [10.0]

    def call():
        now[0] += 1.5

    monkeypatch.setattr(product_timing.time, "perf_counter", lambda: now[0])
    assert seconds_of([call] * 4, torch.device("cpu")) == 1.5


def test_on_cuda_a_replay_is_timed_by_events_and_not_what_launching_takes(fake_cuda):
    calls = []
    seconds = seconds_of([lambda: calls.append(1)] * 3, torch.device("cuda", 0))
    assert seconds == pytest.approx(0.006 / 3)
    assert len(calls) == 6  # a warm-up, and the capture
    assert (len(fake_cuda.captures), fake_cuda.replays) == (1, 2)
