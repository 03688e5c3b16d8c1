"""The table of draft heads in docs/notes/speed.md: a draft step's cost when only some of the vocabulary is drafted.

    python tests/scripts/draft_head.py

A random LLaMA with the vocabulary of Llama 3 (128,256 tokens): its head is most of a draft step. Random weights say
nothing about acceptance; that the output stays the same is checked.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.basics.machine import machine
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.engine.engine import decode
from selfspec.measure.cost_fitting import measure_path_costs
from selfspec.models.layout import apply_layout_
from selfspec.runtime.base import Runtime
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.rules import find_rule
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath, SkipSet

VOCABULARY = 128_256


def text(runtime: Runtime, drafter: Drafter) -> list[int]:
    """Sixty-four greedy tokens after a fixed prompt."""
    sampler = Sampler()
    seq = SequenceState(list(range(100, 140)), 64, sampler)
    for _ in decode(runtime, drafter, seq, rule=find_rule(None, sampler)):
        pass
    return seq.tokens[40:]


def row(name: str, costs: CostModel) -> str:
    """A line of the table."""
    return f"| {name} | {costs.base * 1e3:.1f} | {costs.base / costs.plain:.2f} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 256,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).eval()
    layout = apply_layout_(model, drafting=True)
    runtime = LeanRuntime(model)
    half = tuple(range(1, options.layers, 2))
    skip = SkipSet(half, half)
    plain = text(runtime, PlainDrafter())
    print(f"{machine(runtime.device)}; {options.threads} thread(s); {runtime.dtype}; weights by {layout}")
    print("| drafted from | draft step, ms | of a plain step |")
    print("|---|---|---|")
    for size in (VOCABULARY, VOCABULARY // 4, VOCABULARY // 16):
        tokens = None if size == VOCABULARY else sorted({*range(size), *plain[::2]})
        path = DraftPath(skip, None if tokens is None else tuple(tokens))
        drafter = LayerSkipDrafter(runtime, path, FixedK(3))
        assert text(runtime, drafter) == plain
        costs = measure_path_costs(runtime, path, decodings=2)
        print(row(f"{size:,} tokens", costs))
    print(f"the whole head takes {costs.head * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
