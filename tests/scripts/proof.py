"""Greedy speculation equals plain decoding in float64: many prompts, skip sets and controllers.

    python tests/scripts/proof.py --out tests/scripts/proof.json
    python tests/scripts/proof.py --paths few-bits --prompts 40 --out tests/scripts/proof-few-bits.json

Runs held-out prompts x 32 tokens under every controller along 22 skip sets (the shipped one, the empty one, 20 random
ones), or along 12 draft paths with quantised sub-layers and head (all int8, all int4, 10 random ones), with
lookup tokens; in two processes. Writes what it counted. Exit code 1 when any text differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import selfspec
from selfspec import builtin
from selfspec.controllers import CONTROLLERS
from selfspec.drafters import PlainDrafter
from selfspec.drafters.registry import make_layer_skip
from selfspec.profile.draft_spec import LayerSkipSpec, ProposerSpec
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import find_profile_file
from selfspec.types.acceptance import Confidence
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import LOW, MODES, DraftPath, HeadMode, SkipSet
from selfspec.types.draft_work import DRAFT_STEP
from selfspec.types.stats import Stats

TOKENS = 32
HEADS: tuple[HeadMode, ...] = ("full", "int8", "int4")
BY_GAP = Confidence(bias=1.0, probability=0.2, gap=0.8)
OF_THE_PATH = ("skipped", "in int8", "in int4")


def skip_sets() -> dict[str, SkipSet]:
    """The shipped set, the empty one, and random ones of every size."""
    draw = random.Random(0)
    sets = {"shipped": find_profile_file(builtin.PROFILE).skip_set, "empty": SkipSet()}
    for number in range(20):
        chosen = set(draw.sample(range(32), 1 + number * 30 // 19))
        sets[f"random {number}"] = SkipSet.from_bits([i in chosen for i in range(32)])
    return sets


def quantized_drafts() -> dict[str, DraftPath]:
    """Everything in int8, and in 4; and random paths, any sub-layer and the head in any mode."""
    draw = random.Random(1)
    made = {f"all {mode}": DraftPath.from_modes([mode] * 32, head=mode) for mode in LOW}
    for number in range(10):
        modes, head = draw.choices(MODES, k=32), draw.choice(HEADS)
        words = tuple(draw.sample(range(4096), 3840)) if number % 2 else None
        made[f"random modes {number}"] = DraftPath.from_modes(modes, head=head, vocabulary=words)
    return made


PATHS: dict[str, Callable[[], dict[str, DraftPath]]] = {
    "skip": lambda: {name: DraftPath(skip) for name, skip in skip_sets().items()},
    "few-bits": quantized_drafts,
}


def part(prompts: list[str], kind: str) -> dict[str, dict[str, float]]:
    """Counts for each draft path and controller over some of the prompts."""
    torch.set_num_threads(1)
    llm = selfspec.load("builtin", profile="none", dtype="float64")
    plain = [llm.generate(p, max_new_tokens=TOKENS, drafter=PlainDrafter()).tokens for p in prompts]
    counts: dict[str, dict[str, float]] = {}
    for name, path in PATHS[kind]().items():
        how: dict[str, Any] = {"confidence": BY_GAP, "proposers": [ProposerSpec()]} if kind == "few-bits" else {}
        for controller in CONTROLLERS:
            spec = LayerSkipSpec.from_path(path, ControllerSpec(name=controller), **how)
            drafter = make_layer_skip(llm.runtime, spec, Profile(model=llm.identity))
            total, different = Stats(), 0
            for prompt, expected in zip(prompts, plain, strict=True):
                generation = llm.generate(prompt, max_new_tokens=TOKENS, drafter=drafter)
                total.add(generation.stats)
                different += generation.tokens != expected
            counts[f"{name}, {controller}"] = {
                "skipped": len(path.skip),
                "in int8": len(path.int8),
                "in int4": len(path.int4),
                "texts": len(prompts),
                "different": different,
                "tokens": total.tokens,
                "rounds": total.rounds,
                "draft steps": sum(calls for made, calls in total.work.items() if made.name == DRAFT_STEP.name),
                "drafted": total.drafted,
                "accepted": total.accepted,
            }
    return counts


def main() -> None:
    """Run it and write the summary."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--paths", choices=PATHS, default="skip")
    parser.add_argument("--prompts", type=int, default=150)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    start = time.perf_counter()
    prompts = builtin.prompts("heldout")[: options.prompts]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        parts = pool.starmap(part, [(prompts[::2], options.paths), (prompts[1::2], options.paths)])
    cases = {
        name: {key: value if key in OF_THE_PATH else sum(p[name][key] for p in parts) for key, value in counts.items()}
        for name, counts in parts[0].items()
    }
    different = sum(case["different"] for case in cases.values())
    summary = {
        "claim": "greedy, float64: token for token",
        "paths": options.paths,
        "prompts": len(prompts),
        "tokens_each": TOKENS,
        "texts": sum(case["texts"] for case in cases.values()),
        "different": different,
        "seconds": round(time.perf_counter() - start),
        "versions": {"selfspec": selfspec.__version__, "torch": torch.__version__},
        "cases": cases,
    }
    options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{summary['texts']} texts, {different} different")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
