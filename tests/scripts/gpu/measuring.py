"""What the parts share: their arguments, the lines that they write, and timing on a device.

Imports torch and nothing of selfspec, so that parts about the machine run where selfspec does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class Part:
    """One part of the driver.

    `device` is where it measures, `toy` whether it is a rehearsal on a CPU, `dtype` the dtype that models have.
    """

    def __init__(self, name: str) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--lines", type=Path, required=True)
        parser.add_argument("--end", type=float, default=time.monotonic() + 600)
        parser.add_argument("--rehearse", action="store_true")
        given = parser.parse_args()
        self.name, self.lines, self.toy = name, given.lines, given.rehearse
        self.device = torch.device("cpu") if self.toy else torch.device("cuda", 0)
        self.dtype = torch.bfloat16
        self._end = given.end
        if self.toy:
            torch.set_num_threads(1)

    def line(self, what: str, **values: Any) -> None:
        """Append one line: a kind of measurement and its numbers, none of them nested."""
        line = json.dumps({"part": self.name, "what": what, **values}, default=str)
        with self.lines.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def left(self) -> float:
        """Return the seconds until the driver ends this part."""
        return self._end - time.monotonic()

    @contextmanager
    def attempt(self, what: str, **values: Any) -> Iterator[None]:
        """Write a line with the exception (`failure`) in place of raising it, so that other things are measured."""
        try:
            yield
        except Exception as error:  # whatever a device makes of it
            self.line(what, **values, failure=f"{type(error).__name__}: {str(error)[:400]}")


def synchronise(device: torch.device) -> None:
    """Wait for everything that was asked of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def queued(call: Callable[[], object], device: torch.device, *, repeats: int, warm: int = 3) -> tuple[float, float]:
    """Return the seconds of one of `repeats` calls that are asked for together, and the host's seconds to ask for one.

    The first is by the device's own events on CUDA. On a CPU both are the same.
    """
    for _ in range(warm):
        call()
    synchronise(device)
    if device.type == "cuda":
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    host = (time.perf_counter() - begun) / repeats
    if device.type != "cuda":
        return host, host
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / repeats, host


def awaited(call: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Return the median seconds of a call that is waited for before the next one is asked for."""
    times = []
    for _ in range(repeats):
        synchronise(device)
        begun = time.perf_counter()
        call()
        synchronise(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def replayed(calls: Sequence[Callable[[], object]], device: torch.device, *, repeats: int = 5) -> float:
    """Return the seconds of one of `calls`, captured one after the other as a CUDA graph; on a CPU, called as they are.

    Raises `RuntimeError` when they cannot be captured.
    """
    for call in calls:
        call()
    if device.type != "cuda":
        return queued(lambda: [call() for call in calls], device, repeats=repeats, warm=1)[0] / len(calls)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    seconds = queued(graph.replay, device, repeats=repeats)[0] / len(calls)
    del kept
    return seconds


def read_bandwidth(device: torch.device, size: int) -> float:
    """Return the bytes a second at which a sum reads a tensor of `size` bytes."""
    held = torch.ones(size // 4, device=device)
    return held.nbytes / replayed([held.sum] * 10, device)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Return the bytes a second that a copy of `size` bytes moves, those read and those written counted."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / queued(lambda: target.copy_(source), device, repeats=10)[0]


def product_speed(device: torch.device, n: int) -> float:
    """Return the operations a second of a product of two n by n matrices in bfloat16."""
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / queued(lambda: a @ b, device, repeats=10)[0]
