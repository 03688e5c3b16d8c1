"""Llama 3 8B with random weights: passes by path, rows and context against the roofline; what a token costs the host.

A roofline is the time in which the weights that a pass reads can be read. Random weights say nothing about acceptance.
"""

from __future__ import annotations

import gc
import os
import time
from itertools import pairwise

import torch
from measuring import Part, awaited, queued, read_bandwidth
from subjects import as_on_cuda, parameters, paths, random_llama, read_bytes, size_cache

from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.engine.engine import decode
from selfspec.runtime.base import Runtime
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafter import Limit
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import FULL

part = Part("llama")
device = part.device
as_on_cuda(part)
contexts = (64, 128, 256) if part.toy else (256, 2048, 8192)
repeats = 4 if part.toy else 24
SLOTS = contexts[-1] + 256
model = random_llama(part, positions=SLOTS)
runtime = LeanRuntime(model)
size_cache(runtime, SLOTS)
own = paths(runtime.layers)
bandwidth = read_bandwidth(device, 2**24 if part.toy else 2**32)
read = read_bytes(model)
part.line("model", parameters=parameters(model), weights_gib=read / 2**30, read_gb_per_s=bandwidth / 1e9,
          roofline_ms=1e3 * read / bandwidth)  # fmt: skip


compiled = {name: runtime.compile(path) for name, path in {"plain": FULL, **own}.items()}  # kept: made once
skipped = sum(p.nbytes for layer in model.model.layers[::2] for p in layer.mlp.parameters())


def measure(name: str, runtime: Runtime, rows: int, context: int, kind: str) -> float:
    """Write one line of a pass, and return its seconds when many are asked for together."""
    about = {"path": name, "kind": kind, "rows": rows, "keys": context}
    path = compiled[name]
    tokens = torch.ones(1, rows, dtype=torch.long, device=device)
    seconds = float("nan")
    with part.attempt("pass", **about), runtime.session(context + rows):

        def call() -> object:
            return runtime.forward(tokens, context, path=path)

        for _ in range(3):  # a shape is recorded when it first occurs
            call()
        seconds, host = queued(call, device, repeats=repeats)
        weights = {"plain": read, "skip": read - skipped}.get(name) or runtime.extra_bytes(own[name])
        part.line("pass", **about, ms=1e3 * seconds, awaited_ms=1e3 * awaited(call, device, repeats=repeats),
                  host_us=1e6 * host, times_roofline=seconds * bandwidth / weights)  # fmt: skip
    return seconds


times: dict[tuple[str, int], float] = {}
for context in contexts:
    for rows in (1, 4, 8, 16):
        times["plain", rows] = measure("plain", runtime, rows, context, "as configured")
    for name in ("int8", "int4", "skip") if context == contexts[0] else ("int8", "int4"):
        if part.left() > 25:
            measure(name, runtime, 1, context, "as configured")


def drafting(name: str, k: int = 8) -> None:
    """Write what a drafted token takes, and how much of it is beside its pass."""
    with part.attempt("drafted token", path=name):
        drafter = LayerSkipDrafter(runtime, own[name], FixedK(k))
        seq, took = SequenceState([1] * 200, 500, Sampler()), []
        path = compiled[name]
        with runtime.session(SLOTS):
            prompt = torch.tensor([seq.tokens[:-1]], device=device)
            drafter.begin(seq, runtime.forward(prompt, 0, logits=None))
            for _ in range(8):
                begun = time.perf_counter()
                (draft,) = drafter.propose([seq], [Limit(k)])
                took.append((time.perf_counter() - begun) / max(len(draft), 1))
            token = torch.ones(1, 1, dtype=torch.long, device=device)
            alone = queued(lambda: runtime.forward(token, 200, path=path), device, repeats=repeats)[0]
            drafter.end(seq)
        token_seconds = sorted(took[2:])[len(took[2:]) // 2]
        part.line("drafted token", path=name, ms=1e3 * token_seconds, pass_ms=1e3 * alone,
                  beside_us=1e6 * (token_seconds - alone))  # fmt: skip


def rounds(name: str, tokens: int) -> None:
    """Write what rounds of decoding take as a whole."""
    with part.attempt("rounds", drafts=name):
        drafter = PlainDrafter() if name == "plain" else LayerSkipDrafter(runtime, own[name], FixedK(4))
        for _ in range(2):  # the first time warms everything
            seq = SequenceState([1] * 200, tokens, Sampler(), frozenset())
            stamps, emitted = [time.perf_counter()], 0
            for outcome in decode(runtime, drafter, seq):
                stamps.append(time.perf_counter())
                emitted += len(outcome.tokens)
        each = sorted(b - a for a, b in pairwise(stamps[2:]))
        middle = each[len(each) // 2]
        part.line("rounds", drafts=name, rounds=len(each), ms=1e3 * middle, tokens_a_round=emitted / (len(stamps) - 1))


for name in ("int8", "int4"):
    if part.left() > 20:
        drafting(name)
for name in ("plain", "int8", "int4"):
    if part.left() > 15:
        rounds(name, 12 if part.toy else 48)
if part.left() > 20:
    os.environ["SELFSPEC_GRAPHS"] = "0"
    del runtime._graphs
    runtime._recorder, runtime._graphs = None, None
    gc.collect()
    for name in ("plain", "int8", "int4"):
        measure(name, runtime, 1, contexts[0], "without graphs")
if not part.toy:
    part.line("memory", peak_gib=torch.cuda.max_memory_allocated(device) / 2**30)
