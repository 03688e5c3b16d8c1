"""What the guard lets the worst drafts cost: seconds over plain decoding's, in interleaved runs.

    python tests/scripts/guard.py --out tests/scripts/guard.json

Over 100 and 500 tokens: a model of random weights, of which hardly a draft is right; profiles whose draft is never
accepted, since it drafts one token that never occurs in the text, with half of the layers skipped, or with all in int8
or int4 and lookup tokens; and a machine on which every pass takes twice as long from the middle of the text on. `free`
is the same drafter without the guard. Other users of a machine disturb single runs by more than the guard is allowed,
so the shortest of several runs counts, and plain decoding is compared with itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

import selfspec
from selfspec import builtin
from selfspec.drafters import PlainDrafter
from selfspec.llm.llm import LLM
from selfspec.llm.options import Options
from selfspec.measure.timing import conditions, interleave, method
from selfspec.models.layout import apply_layout_
from selfspec.profile.draft_spec import LayerSkipSpec, ProposerSpec
from selfspec.profile.schema import Profile
from selfspec.runtime.base import Runtime
from selfspec.speculation.tree_batch import PlacedDraft
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath, SkipSet

PROMPTS, ROUNDS = 4, {100: 8, 500: 4}
HALF = SkipSet(tuple(range(1, 16, 2)), tuple(range(1, 16, 2)))


def random_weights(llm: LLM) -> tuple[LLM, Profile]:
    """The built-in architecture with other weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llm.model.config).eval()
    apply_layout_(model, llm.layout or "rows")
    other = selfspec.wrap(model, llm.tokenizer, profile="none", name="random")
    return other, Profile(model=other.identity, draft=LayerSkipSpec.from_path(HALF, _fixed(6)))


def never_right(llm: LLM) -> tuple[LLM, Profile]:
    """Drafts of one token that texts do not have."""
    return llm, Profile(model=llm.identity, draft=LayerSkipSpec.from_path(DraftPath(HALF, (1,)), _fixed(6)))


def never_right_quantised(llm: LLM, mode: Literal["int8", "int4"]) -> tuple[LLM, Profile]:
    """The same of a path whose sub-layers are in `mode` and the head in int8, with lookup tokens below it."""
    path = DraftPath.from_modes([mode] * (2 * llm.runtime.layers), head="int8", vocabulary=(1,))
    return llm, Profile(model=llm.identity, draft=LayerSkipSpec.from_path(path, _fixed(6), proposers=[ProposerSpec()]))


def slowed(llm: LLM) -> tuple[LLM, Profile]:
    """Drafts that are often right, on a machine that gets slower."""
    return llm, Profile(model=llm.identity, draft=LayerSkipSpec.from_path(HALF, _fixed(3)))


def _fixed(k: int) -> ControllerSpec:
    return ControllerSpec(name="fixed", options={"k": k})


class Slow:
    """A runtime's passes over drafts, which take twice as long from a position on."""

    def __init__(self, runtime: Runtime) -> None:
        self._over = runtime.forward_drafts
        self.after = 0

    def __call__(self, placed: Sequence[PlacedDraft], **settings: Any) -> Any:
        begun = time.perf_counter()
        steps = self._over(placed, **settings)
        if placed[0].start >= self.after:
            until = 2 * time.perf_counter() - begun
            while time.perf_counter() < until:
                pass
        return steps


def measured(llm: LLM, profile: Profile, tokens: int, slow: Slow | None) -> dict[str, Any]:
    """Seconds of guarded and free drafting over plain decoding's, as a share of it."""
    options = Options(max_new_tokens=tokens)
    prompts = [llm.encode(prompt)[:64] for prompt in builtin.prompts("heldout")[:PROMPTS]]
    if slow is not None:
        slow.after = 64 + tokens // 2
        prompts = [ids for ids in map(llm.encode, builtin.prompts("heldout")) if len(ids) >= 64][:PROMPTS]
        prompts = [ids[:64] for ids in prompts]
    methods = {
        "plain": method(llm, PlainDrafter(), options),
        "plain again": method(llm, PlainDrafter(), options),
        "guarded": method(llm, llm.guarded_drafter(profile), options),
    }
    stats = {**interleave(methods, prompts, rounds=ROUNDS[tokens]).stats}
    free = method(llm, llm.drafter_for(profile), options)
    stats["free"] = [[free(prompt)] for prompt in prompts]
    shortest = {name: [min(run.seconds for run in runs) for runs in each] for name, each in stats.items()}
    found: dict[str, Any] = {"rounds": ROUNDS[tokens]}
    for name in ("plain again", "guarded", "free"):
        over = [mine / plain - 1 for mine, plain in zip(shortest[name], shortest["plain"], strict=True)]
        runs = [run for each in stats[name] for run in each]
        found[name] = {
            "median": statistics.median(over),
            "worst_prompt": max(over),
            "drafted": statistics.mean(run.drafted for run in runs),
            "acceptance": sum(run.accepted for run in runs) / max(1, sum(run.drafted for run in runs)),
        }
    return found


def main() -> None:
    """Every case at both lengths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    llm = selfspec.load("builtin", profile="none")
    cases: dict[str, Callable[[LLM], tuple[LLM, Profile]]] = {
        "random weights": random_weights,
        "never right": never_right,
        "never right, in int8": partial(never_right_quantised, mode="int8"),
        "never right, in int4": partial(never_right_quantised, mode="int4"),
        "twice as slow from the middle on": slowed,
    }
    found: dict[str, Any] = {**conditions(llm.runtime), "prompts": PROMPTS, "cases": {}}
    for name, case in cases.items():
        subject, profile = case(llm)
        slow = None
        if case is slowed:
            slow = Slow(subject.runtime)
            subject.runtime.forward_drafts = slow  # type: ignore[method-assign]
        for tokens in (100, 500):
            one = found["cases"][f"{name}, {tokens} tokens"] = measured(subject, profile, tokens, slow)
            print(
                f"{name}, {tokens}: guarded {one['guarded']['median']:+.1%} (worst prompt "
                f"{one['guarded']['worst_prompt']:+.1%}), plain again {one['plain again']['median']:+.1%} "
                f"({one['plain again']['worst_prompt']:+.1%}), free {one['free']['median']:+.1%}",
                flush=True,
            )
    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
