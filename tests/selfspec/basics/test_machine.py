from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from selfspec.basics import machine as machines
from selfspec.basics.machine import machine, peak_growth, process_peak, read_bandwidth

CPU = torch.device("cpu")


def test_the_fastest_reading_counts(monkeypatch):
    """On a clock by which reading takes a second, but once, the fifth time, half of one."""
    took = [1.0, 1.0, 1.0, 1.0, 0.5, 1.0]  # three ways, twice
    moments = itertools.accumulate(passed for seconds in took for passed in (0.0, seconds))
    monkeypatch.setattr(machines.time, "perf_counter", lambda: next(moments))
    assert read_bandwidth(4_000_000, CPU, repeats=2) == 976 * 1024 * 4 / 0.5  # whole rows of 1024
    assert next(moments, None) is None


def test_growth_is_a_gpu_s():
    with peak_growth(CPU) as grown:
        pass
    assert grown == []


def test_the_machine_has_a_name():
    assert machine(CPU)


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_what_was_held_at_most_is_in_bytes(monkeypatch, platform, unit):
    resource = pytest.importorskip("resource", reason="this system does not say how much memory a process held")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5000))
    monkeypatch.setattr(sys, "platform", platform)
    assert process_peak() == 5000 * unit


def test_what_was_held_is_unknown_where_the_system_does_not_say(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert process_peak() is None
