"""Imports, versions, bandwidths, and what launches and transfers cost the host."""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys
import time

import torch
from measuring import Part, awaited, copy_bandwidth, product_speed, queued, read_bandwidth, synchronise

part = Part("machine")
device, scale = part.device, 2**14 if part.toy else 1
part.line("machine", name=platform.node(), python=platform.python_version(), cores=torch.get_num_threads())

with part.attempt("device"):
    if part.toy:
        part.line("device", name="CPU", torch=torch.__version__)
    else:
        of = torch.cuda.get_device_properties(device)
        part.line(
            "device", name=of.name, torch=torch.__version__, cuda=torch.version.cuda,
            memory_gib=of.total_memory / 2**30, multiprocessors=of.multi_processor_count,
            l2_mib=getattr(of, "L2_cache_size", 0) / 2**20, capability=str(torch.cuda.get_device_capability(device)),
            cudnn=torch.backends.cudnn.version(),
        )  # fmt: skip
        asked = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit",
            "--format=csv,noheader",
        ]
        part.line("driver", said=subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.strip())

with part.attempt("bandwidth"):
    part.line("bandwidth", of="copy, read and written", gb_per_s=copy_bandwidth(device, 2**32 // scale) / 1e9)
    for size in (2**32, 2**28, 2**24):
        speed = read_bandwidth(device, max(size // scale, 2**14))
        part.line("bandwidth", of=f"sum of {size // scale / 2**20:g} MiB", gb_per_s=speed / 1e9)

with part.attempt("matrix product"):
    n = 256 if part.toy else 8192
    part.line("matrix product", n=n, tflops=product_speed(device, n) / 1e12)

with part.attempt("host"):
    small, other = torch.zeros(64, device=device), torch.zeros(64, device=device)
    seconds, host = queued(lambda: small.add_(1), device, repeats=2000)
    part.line("host", of="launch of one operation", device_us=1e6 * seconds, host_us=1e6 * host)
    part.line("host", of="operation awaited", host_us=1e6 * awaited(lambda: small.add_(1), device, repeats=200))
    part.line("host", of="one value read (item)", host_us=1e6 * awaited(lambda: small[0].item(), device, repeats=200))
    if not part.toy:
        pinned = torch.empty(64, pin_memory=True)

        def fetch() -> None:
            pinned.copy_(small, non_blocking=True)

        part.line("host", of="64 values into pinned memory", host_us=1e6 * awaited(fetch, device, repeats=200))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(1000):
                small.add_(1)
        seconds, host = queued(graph.replay, device, repeats=20)
        part.line("host", of="a graph's node, of 1000", device_us=1e3 * seconds, host_us=1e3 * host)
    synchronise(device)

for name in ("transformers", "triton", "accelerate", "pydantic", "optuna", "cmaes", "selfspec", "selfspec.search"):
    begun = time.perf_counter()
    with part.attempt("import", module=name):
        module = importlib.import_module(name)
        seconds = time.perf_counter() - begun
        part.line("import", module=name, version=getattr(module, "__version__", ""), seconds=seconds)
with part.attempt("import", module="selfspec.llm.llm"):
    begun = time.perf_counter()
    importlib.import_module("selfspec.llm.llm")
    part.line("import", module="selfspec.llm.llm", file=sys.modules["selfspec"].__file__, version="",
              seconds=time.perf_counter() - begun)  # fmt: skip
