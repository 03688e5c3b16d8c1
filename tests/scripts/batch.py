"""Eight sequences in one engine against eight decodings one after the other: the same tokens, and what each takes.

    python tests/scripts/batch.py [--rows 8] [--new-tokens 64] [--rounds 3]

Built-in model and that model widened, float32, one thread, greedy; plain decoding and the shipped profile's drafter.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import selfspec
from selfspec import builtin
from selfspec.basics.machine import machine
from selfspec.drafters import Drafter, PlainDrafter, make_drafter
from selfspec.engine.engine import Engine
from selfspec.measure.audit import first_difference
from selfspec.measure.model_copies import widen
from selfspec.models.layout import apply_layout_
from selfspec.models.loading import load_model
from selfspec.profile import find_profile_file
from selfspec.runtime.base import Runtime
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState


def decoded(runtime: Runtime, drafter: Drafter, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """New tokens of every prompt, as many at once as the runtime has rows, and tokens per second."""
    seqs = [SequenceState(list(prompt), new, Sampler(), runtime.skeleton.ends) for prompt in prompts]
    waiting = list(seqs)
    start = time.perf_counter()
    with Engine(runtime, drafter) as engine:
        while waiting or engine.running:
            while waiting and len(engine.running) < runtime.rows:
                engine.join(waiting.pop(0))
            engine.step()
    seconds = time.perf_counter() - start
    tokens = [seq.tokens[len(prompt) :] for seq, prompt in zip(seqs, prompts, strict=True)]
    return tokens, sum(map(len, tokens)) / seconds


def main() -> None:
    """A line for each model and drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine(torch.device('cpu'))}, 1 thread, {given.dtype}")
    for widened in (1, 8):
        model, tokenizer = load_model("builtin", device="cpu", dtype=given.dtype)
        if widened > 1:
            model = widen(model, widened)
        apply_layout_(model, "rows", drafting=True)
        profile = find_profile_file(builtin.PROFILE)
        alone, together = LeanRuntime(model), LeanRuntime(model, rows=given.rows)
        llm = selfspec.wrap(model, tokenizer, profile="none", name="builtin")
        prompts = [llm.encode(prompt) for prompt in builtin.prompts("heldout")[: given.rows]]
        for name in ("plain", "layer skip"):
            speeds: list[list[float]] = [[], []]
            texts: list[list[list[int]]] = [[], []]
            for _ in range(given.rounds + 1):
                for i, runtime in enumerate((alone, together)):
                    drafter = PlainDrafter() if name == "plain" else make_drafter(runtime, profile)
                    texts[i], speed = decoded(runtime, drafter, prompts, given.new_tokens)
                    speeds[i].append(speed)
            found = [
                first_difference(alone, prompt, a, b) for prompt, a, b in zip(prompts, *texts, strict=True) if a != b
            ]
            ties = sum(difference is not None and difference.near_tie for difference in found)
            one, many = (statistics.median(of[1:]) for of in speeds)
            print(
                f"widened {widened}, {name}: one after the other {one:.1f} tokens/s, {given.rows} at once {many:.1f} "
                f"({many / one:.2f} times); {len(prompts) - len(found)} of {len(prompts)} texts the same, "
                f"{ties} near-ties, {len(found) - ties} bugs",
                flush=True,
            )


if __name__ == "__main__":
    main()
