"""One pass captured and replayed, how long that takes, and whether a pass that cannot be captured does any harm."""

from __future__ import annotations

import logging
import os
import time

import torch
from measuring import Part, queued, synchronise
from subjects import as_on_cuda, load_builtin

from selfspec.runtime.cuda_graphs import CudaRecorder
from selfspec.runtime.forward import LeanRuntime

part = Part("capture")
device = part.device
logging.basicConfig(level=logging.WARNING)
model, _ = load_builtin(part)
os.environ["SELFSPEC_GRAPHS"] = "0"
eager = LeanRuntime(model)
os.environ["SELFSPEC_GRAPHS"] = "1"
as_on_cuda(part)
recorded = LeanRuntime(model)
token = torch.tensor([[5]], device=device)


def eager_pass() -> torch.Tensor:
    with eager.session(64):
        return eager.forward(token, 0).logits


with part.attempt("capture"), eager.session(64), recorded.session(64):
    for position in range(5):
        synchronise(device)
        begun = time.perf_counter()
        ours = recorded.forward(token, position).logits
        synchronise(device)
        seconds = time.perf_counter() - begun
        theirs = eager.forward(token, position).logits
        off = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
        part.line("capture", call=position, ms=1e3 * seconds, relative_difference=off, same=torch.equal(ours, theirs))
    for name, runtime in (("graph", recorded), ("eager", eager)):
        seconds, host = queued(lambda runtime=runtime: runtime.forward(token, 5), device, repeats=50)
        part.line("pass", kind=name, ms=1e3 * seconds, host_us=1e6 * host)

if not part.toy:
    with part.attempt("refused capture"):
        recorder, x = CudaRecorder(device), torch.ones(8, device=device)
        before = torch.cuda.memory_reserved(device)
        try:
            recorder.record(lambda: x[0].item(), recorder.pool())
            said = "nothing was raised"
        except RuntimeError as error:
            said = str(error).splitlines()[0]
        part.line("refused capture", said=said)
    for name, call in {
        "a sum": lambda: float((torch.ones(8, device=device) + 1).sum()),
        "random numbers": lambda: bool(torch.rand(8, device=device).isfinite().all()),
        "memory": lambda: torch.empty(2**24, device=device).fill_(1).sum().item(),
        "another capture": lambda: recorder.record(lambda: x + 1, recorder.pool())[1](),
        "a pass": lambda: float(eager_pass().float().abs().max()),
    }.items():
        with part.attempt("after a refused capture", of=name):
            part.line("after a refused capture", of=name, value=str(call()))
    part.line("refused capture", said="memory in MiB", value=(torch.cuda.memory_reserved(device) - before) / 2**20)
