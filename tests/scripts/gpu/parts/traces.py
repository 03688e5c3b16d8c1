"""A profiler's trace of five rounds, plain and with int8 drafts, on the host and on the device; what a round calls."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from itertools import islice
from pathlib import Path

import torch
from measuring import Part, synchronise
from subjects import as_on_cuda, load_widened, paths, size_cache
from torch.profiler import ProfilerActivity, profile

from selfspec import builtin
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.engine.engine import decode
from selfspec.runtime.device_rounds import ENV_VAR
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

os.environ["TEARDOWN_CUPTI"] = "0"  # profiling twice in a process that replays graphs
part = Part("traces")
device = part.device
as_on_cuda(part)
ROUNDS = 2 if part.toy else 5
activities = [ProfilerActivity.CPU, *([] if part.toy else [ProfilerActivity.CUDA])]
os.environ[ENV_VAR] = "0"
llm = load_widened(part, 18)
prompt = llm.encode(builtin.prompts("heldout")[0])
of_int8 = paths(llm.runtime.layers)["int8"]

os.environ[ENV_VAR] = "1"
on_gpu = llm.runtime.with_new_cache()
size_cache(on_gpu, 1024)
cases = {"plain": (llm.runtime, PlainDrafter()), "plain-on-device": (on_gpu, PlainDrafter())} | {
    name: (runtime, LayerSkipDrafter(runtime, of_int8, FixedK(4)))
    for name, runtime in (("int8", llm.runtime), ("int8-on-device", on_gpu))
}
for runtime, drafter in (*cases.values(), *cases.values()):  # everything is recorded before anything is profiled
    list(decode(runtime, drafter, SequenceState(list(prompt), 64, Sampler(), frozenset())))
for name, (runtime, drafter) in cases.items():
    with part.attempt("round", drafts=name):
        rounds = decode(runtime, drafter, SequenceState(list(prompt), 200, Sampler(), frozenset()))
        list(islice(rounds, 3))
        synchronise(device)
        with profile(activities=activities) as profiled:
            list(islice(rounds, ROUNDS))
            synchronise(device)
        rounds.close()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiled.export_chrome_trace(str(trace))
            target = part.lines.parent / f"trace-{name}.json.gz"
            with trace.open("rb") as source, gzip.open(target, "wb") as packed:
                shutil.copyfileobj(source, packed)
        averages = profiled.key_averages()
        on_device = [event for event in averages if event.device_type != torch.autograd.DeviceType.CPU]

        def calls(*names: str) -> float:
            return sum(event.count for event in averages if event.key.startswith(names)) / ROUNDS

        part.line(
            "round", drafts=name, kernels=sum(event.count for event in on_device) / ROUNDS,
            device_ms=sum(event.self_device_time_total for event in on_device) / 1e3 / ROUNDS,
            launches=calls("cudaLaunchKernel", "cuLaunchKernel"), graphs=calls("cudaGraphLaunch"),
            copies_to_host=calls("Memcpy DtoH"), copies_to_device=calls("Memcpy HtoD"),
            waits=calls("cudaStreamSynchronize", "cudaEventSynchronize"),
            trace_kib=target.stat().st_size / 2**10,
        )  # fmt: skip
        own = "self_device_time_total" if on_device else "self_cpu_time_total"
        for event in sorted(on_device or averages, key=lambda event: -getattr(event, own))[:12]:
            time = getattr(event, own) / ROUNDS
            part.line("operation", drafts=name, operation=event.key[:90], calls_a_round=event.count / ROUNDS, us=time)
