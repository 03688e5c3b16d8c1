"""Llama 3 8B with random weights after 2,048 tokens: passes, and rounds on the device with a fixed number of tokens.

Random weights say nothing about acceptance, but a round of a fixed number of tokens takes as long whatever is accepted:
its speed follows from the chance that a drafted token is accepted.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import islice

import torch
from measuring import Part, queued, read_bandwidth, synchronise
from subjects import as_on_cuda, paths, random_llama, read_bytes, size_cache

from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.engine.engine import decode
from selfspec.proposers.base import ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import FULL

part = Part("llama_rounds")
device = part.device
as_on_cuda(part)
keys, lengths = (64, (2,)) if part.toy else (2048, (2, 4, 6, 8, 12))
model = random_llama(part, positions=keys + 2048)
runtime = LeanRuntime(model)
size_cache(runtime, keys + 1024)
own = paths(runtime.layers)
read = read_bytes(model)
bandwidth = read_bandwidth(device, 2**24 if part.toy else 2**32)
part.line("model", weights_gb=read / 1e9, read_gb_per_s=bandwidth / 1e9, roofline_ms=1e3 * read / bandwidth)

compiled = {"plain": runtime.compile(FULL), **{name: runtime.compile(own[name]) for name in ("int4", "int8")}}
tokens = torch.randint(model.config.vocab_size, (1, keys + 16), device=device)
with runtime.session(keys + 16):
    runtime.forward(tokens[:, :keys], 0, logits=None)
    for name, n in (("plain", 1), ("plain", 5), ("plain", 9), ("plain", 16), ("int4", 1), ("int8", 1)):
        call = partial(runtime.forward, tokens[:, keys : keys + n], keys, path=compiled[name])
        seconds, host = queued(call, device, repeats=2 if part.toy else 24)
        part.line("pass", path=name, rows=n, keys=keys, ms=1e3 * seconds, host_us=1e6 * host)

drafters = {"plain": PlainDrafter()}
for name, many in (("int4", lengths), ("int8", lengths[1:2])):
    drafters |= {f"{name}, {k}": LayerSkipDrafter(runtime, own[name], FixedK(k)) for k in many}
chain = ProposerChain([Lookup()])
drafters["int4, 4, lookup"] = LayerSkipDrafter(runtime, own["int4"], FixedK(4), proposer_chain=chain)
prompt = tokens[0, :keys].tolist()
for name, drafter in drafters.items():
    if part.left() < 5:
        break
    with part.attempt("round", drafts=name):
        for _ in range(2):  # what is captured is captured the first time
            rounds = decode(runtime, drafter, SequenceState(list(prompt), 900, Sampler(), frozenset()))
            list(islice(rounds, 4))
            synchronise(device)
            begun = time.perf_counter()
            count = len(list(islice(rounds, 3 if part.toy else 30)))
            seconds = (time.perf_counter() - begun) / count
            rounds.close()
        part.line("round", drafts=name, keys=keys, ms=1e3 * seconds)
