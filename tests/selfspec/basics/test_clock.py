"""The clock that stands still."""

from __future__ import annotations

import threading
from contextlib import suppress

from selfspec.basics import clock as clocks
from selfspec.basics.clock import clock, clock_stopped


def test_the_clock_stands_still_in_its_own_thread(monkeypatch):
    now, others = [100.0], []
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(clocks, "_stopped", threading.local())
    assert clock() == 100.0
    with clock_stopped():
        now[0] += 7
        with clock_stopped():  # nested: not counted twice
            now[0] += 2
    now[0] += 1
    assert clock() == 101.0
    thread = threading.Thread(target=lambda: others.append(clock()))
    thread.start()
    thread.join()
    assert others == [110.0]
    with suppress(ValueError), clock_stopped():
        now[0] += 5
        raise ValueError
    assert clock() == 101.0
