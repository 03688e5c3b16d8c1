"""Tokens a second of 1, 8 and 32 sequences together: plainly, with four int8 drafts each, and as the load decides."""

from __future__ import annotations

import gc
import os
import statistics

import torch
from measuring import Part
from subjects import as_on_cuda, load_widened, paths
from throughput import Ours

from selfspec import builtin
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.llm.options import Options
from selfspec.runtime.device_rounds import ENV_VAR

os.environ[ENV_VAR] = "1"  # rounds of several sequences too
part = Part("batches")
as_on_cuda(part)
llm = load_widened(part, 48)
path = paths(llm.runtime.layers)["int8"]
options = Options(max_new_tokens=6 if part.toy else 64, settings={"eos_token_id": [-1]})
every = [llm.encode(text)[-256:] for text in builtin.prompts("heldout")]


def drafts(runtime) -> LayerSkipDrafter:
    return LayerSkipDrafter(runtime, path, FixedK(4))


runs: dict[str, Ours] = {}
for rows in (1, 2) if part.toy else (1, 8, 32):
    if part.left() < 20:
        break
    runs.clear()  # their caches, before others are made
    gc.collect()
    if not part.toy:
        torch.cuda.empty_cache()
    with part.attempt("together", sequences=rows):
        prompts = [every[i % len(every)] for i in range(max(rows, 2))]
        runs = {
            "plain": Ours(llm, rows, options, adaptive=False, make=lambda runtime: PlainDrafter()),
            "fixed": Ours(llm, rows, options, adaptive=False, make=drafts),
            "by load": Ours(llm, rows, options, adaptive=True, make=drafts),
        }
        speeds, texts = {name: [] for name in runs}, {}
        for _ in range(3):  # a shape is recorded when it first occurs, so the third counts
            for name, run in runs.items():
                texts[name], seconds, *_ = run(prompts)
                speeds[name].append(sum(map(len, texts[name])) / seconds)
        speed = {name: statistics.median(each[2:]) for name, each in speeds.items()}
        same = sum(a == b == c for a, b, c in zip(*texts.values(), strict=True))
        ratios = {f"{name} / plain": speed[name] / speed["plain"] for name in ("fixed", "by load")}
        part.line("together", sequences=rows, plain_tokens_per_second=speed["plain"], **ratios, texts=len(prompts),
                  same=same)  # fmt: skip
        for run in runs.values():
            run.batch.__exit__(None, None, None)
