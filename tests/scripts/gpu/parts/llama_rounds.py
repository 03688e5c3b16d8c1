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
from subjects import as_on_cuda, paths, size_cache
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.engine.engine import decode
from selfspec.models.layout import join_all_
from selfspec.proposers.base import ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import FULL

part = Part("llama_rounds")
device = part.device
as_on_cuda(part)
sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
sizes |= {"vocab_size": 128256, "num_hidden_layers": 32}
if part.toy:
    sizes = {name: max(value // 64, 2) for name, value in sizes.items()} | {"num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2}
keys, lengths = (64, (2,)) if part.toy else (2048, (2, 4, 6, 8, 12))
config = LlamaConfig(**sizes, max_position_embeddings=keys + 2048, rope_theta=500000.0)
with device, torch.random.fork_rng(devices=[] if part.toy else [device]):
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=part.dtype).eval()
join_all_(model)
runtime = LeanRuntime(model)
size_cache(runtime, keys + 1024)
own = paths(runtime.layers)
read = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
bandwidth = read_bandwidth(device, 2**24 if part.toy else 2**32)
part.line("model", weights_gb=read / 1e9, read_gb_per_s=bandwidth / 1e9, roofline_ms=1e3 * read / bandwidth)

compiled = {"plain": runtime.compile(FULL), **{name: runtime.compile(own[name]) for name in ("int4", "int8")}}
tokens = torch.randint(config.vocab_size, (1, keys + 16), device=device)
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
