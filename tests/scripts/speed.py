"""The README's speed table: transformers' generate, plain decoding and layer skip, interleaved on held-out prompts.

    python tests/scripts/speed.py

transformers runs on a copy of the model of its own.
"""

from __future__ import annotations

import argparse

import torch

import selfspec
from selfspec import builtin
from selfspec.bench import interleave, machine, method, transformers_generate
from selfspec.drafters import PlainDrafter
from selfspec.options import Options
from selfspec.profile import find_profile_file


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", default=builtin.PROFILE)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    profile = find_profile_file(options.profile)
    llm = selfspec.load(profile="none")
    theirs = selfspec.load(profile="none")
    drafter = llm.layer_skip(profile.skip_set, profile.controller)
    prompts = builtin.prompts("heldout")[-options.prompts :]
    print(
        f"{machine(llm.runtime.device)}; {torch.get_num_threads()} thread(s); {llm.runtime.dtype}; "
        f"{len(prompts)} held-out prompts x {options.max_new_tokens} tokens x {options.rounds} rounds; "
        f"skip set of {len(profile.skip_set)} sub-layers"
    )
    print("| temperature | method | tokens/s | / transformers | / plain | acceptance | tokens a pass |")
    print("|---|---|---|---|---|---|---|")
    for temperature in (0.0, 0.8):
        new = Options(max_new_tokens=options.max_new_tokens, temperature=temperature)
        runs = interleave(
            {
                "transformers": transformers_generate(theirs, new),
                "plain": method(llm, PlainDrafter(), new),
                "layer skip": method(llm, drafter, new),
            },
            prompts,
            rounds=options.rounds,
        )
        for name in ("transformers", "plain", "layer skip"):
            total = runs.total(name)
            cells = []
            for base in ("transformers", "plain"):
                ratio, (low, high) = runs.speedup(name, base)
                cells.append("1" if name == base else f"{ratio:.2f} ({low:.2f} to {high:.2f})")
            acceptance = f"{total.acceptance_rate:.0%}" if total.drafted else "-"
            print(
                f"| {temperature:g} | {name} | {total.tokens_per_second:.0f} | {cells[0]} | {cells[1]} | "
                f"{acceptance} | {total.tokens_per_round:.2f} |"
            )


if __name__ == "__main__":
    main()
