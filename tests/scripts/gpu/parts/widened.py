"""Texts of the built-in model, widened to 1 and to 7 billion parameters: real acceptance at a large model's cost.

Plain decoding, `transformers`' generate and drafts are interleaved, the guard on and off. All have their weights
joined; every method runs on every prompt once beforehand, so that all shapes are recorded before the clock starts.
About half of the added weights are zeros.
"""

from __future__ import annotations

import gc

import torch
from measuring import Part
from subjects import as_on_cuda, load_widened, parameters, paths

from selfspec import builtin
from selfspec.controllers import AdaptiveThreshold, FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.drafters.guard import Guard
from selfspec.llm.options import Options
from selfspec.measure.summary import summary
from selfspec.measure.timing import interleave, method, same_length, transformers_generate
from selfspec.proposers.base import ProposerChain
from selfspec.proposers.lookup import Lookup

part = Part("widened")
as_on_cuda(part)
tokens, prompts = (8, builtin.prompts("heldout")[:1]) if part.toy else (128, builtin.prompts("heldout")[:2])

for factor, temperature, reserve in ((48, 0.0, 40), (18, 0.0, 25), (48, 0.8, 45)):
    if part.left() < reserve:
        break
    llm = methods = runs = run = drafter = None
    gc.collect()
    if not part.toy:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with part.attempt("texts", factor=factor):
        llm = load_widened(part, factor)
        about = {"parameters": f"{parameters(llm.model) / 1e9:.2g}B", "temperature": temperature}
        options = same_length(Options(max_new_tokens=tokens, temperature=temperature))
        methods = {"plain": method(llm, PlainDrafter(), options), "hf": transformers_generate(llm, options)}
        for name, path in paths(llm.runtime.layers).items():
            for k in (2, 4, 8) if name == "int4" else (4,):
                methods[f"{name}, {k}"] = method(llm, LayerSkipDrafter(llm.runtime, path, FixedK(k)), options)
        int4, chain = paths(llm.runtime.layers)["int4"], ProposerChain([Lookup()])
        drafter = LayerSkipDrafter(llm.runtime, int4, FixedK(4))
        methods["int4, 4, guarded"] = method(llm, Guard(drafter), options)
        drafter = LayerSkipDrafter(llm.runtime, int4, FixedK(4), proposer_chain=chain)
        methods["int4, 4, lookup"] = method(llm, drafter, options)
        methods["int4, adaptive"] = method(llm, LayerSkipDrafter(llm.runtime, int4, AdaptiveThreshold()), options)
        for run in methods.values():
            for prompt in prompts:
                if part.left() > 30:
                    run(prompt)
        rounds = 1 if part.toy or temperature else 2
        runs = interleave(methods, prompts, rounds=rounds, go_on=lambda runs: part.left() > 15)
        for name in methods:
            found = summary(runs, name, bases=["plain", "hf"])
            ratio = {f"/ {base}": of["median"] for base, of in (found["ratio"] or {}).items()}
            part.line(
                "texts", **about, method=name, tokens_per_second=found["tokens_per_second"], **ratio,
                tokens_a_round=found["tokens_per_round"], acceptance=found["acceptance_rate"],
                draft_cost=found["draft_cost"],
            )  # fmt: skip
        if not part.toy:
            part.line("memory", **about, peak_gib=torch.cuda.max_memory_allocated(part.device) / 2**30)
