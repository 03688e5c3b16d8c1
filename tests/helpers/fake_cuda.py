"""torch.cuda as tests pretend that it is there: streams, graphs and events that only note what was asked of them."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch


class FakeCuda:
    """Record of calls: the `streams` made, `captures` as (stream, pool), `replays`, and events' `stamps`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[Any] = []
        self.captures: list[tuple[Any, Any]] = []
        self.replays = self.stamps = 0
        self.current: Any = _Stream()
        for name in ("Stream", "stream", "CUDAGraph", "graph", "Event"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")

    def Stream(self) -> Any:  # noqa: N802 (torch's name)
        self.streams.append(_Stream())
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: Any):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self) -> Any:  # noqa: N802
        return _Graph(self)

    @contextmanager
    def graph(self, graph: Any, *, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"):
        self.captures.append((stream, pool))
        with self.stream(stream):
            yield

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802
        return _Event(self)


class _Stream:
    def wait_stream(self, other: Any) -> None:
        assert isinstance(other, _Stream)


class _Graph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def replay(self) -> None:
        self._cuda.replays += 1


class _Event:
    """An event that is 6 ms after the last one."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.stamp = cuda, 0

    def record(self) -> None:
        self._cuda.stamps += 6
        self.stamp = self._cuda.stamps

    def synchronize(self) -> None:
        assert self.stamp

    def elapsed_time(self, other: Any) -> float:
        return float(other.stamp - self.stamp)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)
