"""What each verification rule accepts: tokens a pass on held-out prompts, counted, not timed.

python tests/scripts/rules.py
"""

from __future__ import annotations

import argparse
import statistics

import torch

import selfspec
from selfspec import builtin
from selfspec.controllers import FixedK, StaticThreshold
from selfspec.drafters import LayerSkipDrafter
from selfspec.profile.shipped import find_profile_file

RULES = ("token", "block", "match")


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    llm = selfspec.load("builtin", profile="none")
    skip = find_profile_file(builtin.PROFILE).skip_set
    prompts = builtin.prompts("heldout")[: options.prompts]
    kinds = {
        "chains, threshold 0.5": (StaticThreshold(0.5, 12), 1),
        "chains of 4": (FixedK(4), 1),
        "chains of 4, 3 candidates": (FixedK(4), 3),
    }
    print(f"{len(prompts)} held-out prompts x {options.max_new_tokens} tokens, {len(skip)} sub-layers skipped")
    print("| temperature | drafts | " + " | ".join(RULES) + " |")
    print("|---|---|" + "---|" * len(RULES))
    for temperature in (0.8, 1.0):
        for kind, (controller, candidates) in kinds.items():
            drafter = LayerSkipDrafter(llm.runtime, skip, controller, candidates=candidates)
            cells = []
            for rule in RULES:
                sampling = {"temperature": temperature, "rule": rule, "max_new_tokens": options.max_new_tokens}
                each = [
                    llm.generate(prompt, seed=number, drafter=drafter, **sampling).stats.tokens_per_round
                    for number, prompt in enumerate(prompts)
                ]
                error = statistics.stdev(each) / len(each) ** 0.5
                cells.append(f"{statistics.mean(each):.2f} ± {error:.2f}")
            print(f"| {temperature:g} | {kind} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
