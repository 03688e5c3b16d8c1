"""Timing of products on a device: on CUDA from graph replays, as small kernels take longer to launch than to run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch


def seconds_of(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the mean seconds of one of `calls`, run one after the other on `device`.

    On CUDA they are captured as a graph, and its replay is timed by the device's own events. Raises `RuntimeError` if
    they cannot be captured.
    """
    if device.type != "cuda":
        begun = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begun) / len(calls)
    graph, first, last = _captured(calls, device)
    graph.replay()  # the first replay also uploads the graph
    first.record()
    graph.replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / len(calls)


def _captured(
    calls: Sequence[Callable[[], object]], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, torch.cuda.Event, torch.cuda.Event]:
    """Return a graph of `calls`, and two events to time its replay."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for call in calls:
                call()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        return graph, first, last
