"""The machine: its devices and memory, a clock that can stand still, and whether the hub can be reached."""

from __future__ import annotations

import ctypes
import math
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
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
    """Collect garbage, and return freed memory to the system as `trim_memory` does."""
    import gc

    gc.collect()
    trim_memory()


def trim_memory() -> None:
    """Return freed memory to the system, where the C library is glibc; it keeps freed blocks below 32 MiB otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def available_memory() -> float:
    """Return the bytes of main memory that can be had without swapping, within the limit of a container.

    Infinity if the system does not report it.
    """
    info = Path("/proc/meminfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    available = math.inf if found is None else int(found[1]) * 1024.0
    return min([available, *map(_left, CONTAINERS)])


# Files of a container's limit of memory, of the memory in use, and of what that consists of: control groups 2 and 1.
CONTAINERS = (
    [Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current", "memory.stat")],
    [Path("/sys/fs/cgroup/memory", f"memory.{name}") for name in ("limit_in_bytes", "usage_in_bytes", "stat")],
)


_CACHED = ("inactive_file", "total_inactive_file")  # files in memory, which may be taken back at any time


def _left(files: Sequence[Path]) -> float:
    """Return the bytes that a container may still take, with files in its page cache; infinity without a limit."""
    try:
        limit, used, stat = (file.read_text("utf-8").split() for file in files)
        cached = next((int(stat[at + 1]) for at, name in enumerate(stat) if name in _CACHED), 0)
        return max(float(limit[0]) - int(used[0]) + cached, 0.0)
    except (OSError, ValueError, IndexError):  # no such file, or "max"
        return math.inf


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


PATIENCE = 5.0  # timeout of the request to the hub, in seconds
MEMORY = 30.0  # how long a hub that did not answer is not asked again, in seconds
_silent: dict[str, float] = {}  # when an endpoint did not answer, by `time.monotonic`


def unreachable() -> str | None:
    """Return why the hub is unreachable, or None if it answers.

    The request waits `PATIENCE` seconds at most, for the name's resolution too, which has no timeout of its own; the
    libraries that download from the hub retry for half a minute or more, and some of their requests wait for ever.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the cache has no copy"
    endpoint = str(constants.ENDPOINT)
    if time.monotonic() - _silent.get(endpoint, -MEMORY) >= MEMORY and _answers(endpoint):
        return None
    _silent.setdefault(endpoint, time.monotonic())
    return f"{endpoint} cannot be reached, and the cache has no copy"


def _answers(endpoint: str) -> bool:
    """Return whether the hub answers within `PATIENCE` seconds."""
    from huggingface_hub import get_session

    _silent.pop(endpoint, None)
    answered, ended = Event(), Event()

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=PATIENCE)
            answered.set()
        except Exception:  # the network can fail in any way
            pass
        finally:
            ended.set()

    Thread(target=ask, daemon=True).start()
    ended.wait(PATIENCE)
    return answered.is_set()


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
