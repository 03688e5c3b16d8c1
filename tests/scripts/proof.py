"""Greedy speculation equals plain decoding in float64: many prompts, skip sets and controllers.

    python tests/scripts/proof.py --out tests/scripts/proof.json

Runs 150 held-out prompts x 32 tokens under 22 skip sets (the shipped one, the empty one, 20 random ones) and every
controller, in two processes, and writes what it counted. Exit code 1 when any text differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from pathlib import Path

import torch

import selfspec
from selfspec import builtin
from selfspec.controllers import CONTROLLERS
from selfspec.drafters import PlainDrafter
from selfspec.facts.controller import ControllerSpec
from selfspec.facts.skip import SkipSet
from selfspec.facts.stats import Stats
from selfspec.profile.shipped import find_profile_file

TOKENS = 32


def skip_sets() -> dict[str, SkipSet]:
    """The shipped set, the empty one, and random ones of every size."""
    draw = random.Random(0)
    sets = {"shipped": find_profile_file(builtin.PROFILE).skip_set, "empty": SkipSet()}
    for number in range(20):
        chosen = set(draw.sample(range(32), 1 + number * 30 // 19))
        sets[f"random {number}"] = SkipSet.from_bits([i in chosen for i in range(32)])
    return sets


def part(prompts: list[str]) -> dict[str, dict[str, float]]:
    """Counts for each skip set and controller over some of the prompts."""
    torch.set_num_threads(1)
    llm = selfspec.load(profile="none", dtype="float64")
    plain = [llm.generate(p, max_new_tokens=TOKENS, drafter=PlainDrafter()).tokens for p in prompts]
    counts: dict[str, dict[str, float]] = {}
    for name, skip in skip_sets().items():
        for controller in CONTROLLERS:
            drafter, total, different = llm.layer_skip(skip, ControllerSpec(name=controller)), Stats(), 0
            for prompt, expected in zip(prompts, plain, strict=True):
                generation = llm.generate(prompt, max_new_tokens=TOKENS, drafter=drafter)
                total.add(generation.stats)
                different += generation.tokens != expected
            counts[f"{name}, {controller}"] = {
                "skipped": len(skip),
                "texts": len(prompts),
                "different": different,
                "tokens": total.tokens,
                "drafted": total.drafted,
                "accepted": total.accepted,
            }
    return counts


def main() -> None:
    """Run it and write the summary."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=150)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    start = time.perf_counter()
    prompts = builtin.prompts("heldout")[: options.prompts]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        parts = pool.map(part, [prompts[::2], prompts[1::2]])
    cases = {
        name: {key: value if key == "skipped" else sum(p[name][key] for p in parts) for key, value in counts.items()}
        for name, counts in parts[0].items()
    }
    different = sum(case["different"] for case in cases.values())
    summary = {
        "claim": "greedy, float64: token for token",
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
