"""A clock for timing rounds, which stands still during work that is done once, such as capturing a CUDA graph."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_stopped = threading.local()  # `seconds` that this thread's clock stood still


def clock() -> float:
    """Return the seconds of `time.perf_counter`, less those during which this thread's clock stood still."""
    return time.perf_counter() - getattr(_stopped, "seconds", 0.0)


@contextmanager
def clock_stopped() -> Iterator[None]:
    """Let this thread's `clock` stand still."""
    stopped_at = clock()
    try:
        yield
    finally:
        _stopped.seconds = time.perf_counter() - stopped_at
