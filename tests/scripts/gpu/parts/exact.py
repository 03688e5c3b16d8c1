"""Float64 texts against `transformers`' own, token for token; audits of the other dtypes with near-ties counted."""

from __future__ import annotations

import torch
from measuring import Part
from subjects import as_on_cuda, load_builtin, paths

import selfspec
from selfspec import builtin
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.llm.llm import LLM
from selfspec.llm.options import Options
from selfspec.measure.audit import audit

part = Part("exact")
as_on_cuda(part)
tokens, prompts = (8, builtin.prompts("heldout")[:1]) if part.toy else (64, builtin.prompts("heldout")[:6])

options = Options(max_new_tokens=tokens)


def generate(llm: LLM, ids: list[int]) -> list[int]:
    """Return the greedy text of `transformers`' own generate."""
    given = torch.tensor([ids], device=llm.runtime.device)
    how = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0}
    return llm.model.generate(given, attention_mask=torch.ones_like(given), **how)[0, len(ids) :].tolist()


for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.float32):
    if part.left() < 15:
        break
    name = str(dtype).removeprefix("torch.")
    with part.attempt("audit", dtype=name):
        llm = selfspec.wrap(*load_builtin(part, dtype), profile="none", name="builtin")
        own = paths(llm.runtime.layers)
        chosen = ["skip"] if dtype == torch.float64 else ["skip", "int8", "int4"]
        drafters = {name: LayerSkipDrafter(llm.runtime, own[name], FixedK(4), candidates=2) for name in chosen}
        if dtype == torch.float64:
            texts = [(ids, generate(llm, ids)) for ids in map(llm.encode, prompts)]
            for label, drafter in {"plain": PlainDrafter(), **drafters}.items():
                found = [(llm.run(ids, options, drafter=drafter).tokens, theirs) for ids, theirs in texts]
                same = sum(list(ours) == theirs[: len(ours)] for ours, theirs in found)
                part.line("as transformers", dtype=name, drafts=label, texts=len(texts), same=same)
        for label, drafter in drafters.items():
            for temperature in (0.0, 0.8):
                found = audit(llm, drafter, prompts, max_new_tokens=tokens, temperature=temperature).as_dict()
                kept = {key: found[key] for key in ("prompts", "tokens", "near_ties", "bugs")}
                part.line("audit", dtype=name, drafts=label, temperature=temperature, **kept)
