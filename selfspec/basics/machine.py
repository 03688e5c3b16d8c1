"""The machine: device name, synchronisation, memory bandwidth and peak memory."""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LARGEST = 4 * 10**8  # maximum bytes to read; more than the CPU cache of one processor holds


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def machine(device: torch.device) -> str:
    """Return the name of the GPU, or the name of the CPU with its number of logical cores, if the system lists them."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if "model name" in line]
        if cpuinfo.exists()
        else []
    )
    name = names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()
    return f"{name}, {len(names) or 1} cores" if names else name


def read_bandwidth(size: int, device: torch.device, *, repeats: int = 5) -> float:
    """Measure the read bandwidth in bytes per second over `size` bytes, at most 400 MB.

    Returns the highest bandwidth of a matrix-vector product, a sum and a maximum over float32 values, each run
    `repeats` times with torch's number of threads.
    """
    import torch

    columns = 1024
    weights = torch.ones((max(1, min(size, _LARGEST) // (4 * columns)), columns), device=device)
    vector = torch.ones(columns, device=device)
    ways: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: torch.mv(weights, vector),
        lambda: weights.sum(),
        lambda: weights.max(),
    )
    best = float("inf")
    for _ in range(repeats):
        for operation in ways:
            synchronise(device)
            start = time.perf_counter()
            operation()
            synchronise(device)
            best = min(best, time.perf_counter() - start)
    return weights.numel() * 4 / best


def release_memory() -> None:
    """Return freed memory to the system, where the C library is glibc; it keeps freed blocks below 32 MiB otherwise."""
    import gc

    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def available_memory() -> float:
    """Return the bytes of main memory that can be had without swapping; infinity if the system does not report it."""
    info = Path("/proc/meminfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return float("inf") if found is None else int(found[1]) * 1024.0


def process_peak() -> int | None:
    """Return this process's peak resident memory in bytes; None if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else max_rss * 1024


@contextmanager
def peak_growth(device: torch.device) -> Iterator[list[int]]:
    """Yield a list; on exit, append the peak growth of torch's GPU memory in bytes to it. On a CPU it stays empty."""
    growth: list[int] = []
    if device.type != "cuda":
        yield growth
        return
    import torch

    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield growth
    growth.append(torch.cuda.max_memory_allocated(device) - before)
