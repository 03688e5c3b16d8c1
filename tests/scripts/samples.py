"""20,000 samples of the built-in model at two settings, plain and drafted: could they be of one distribution?

    python tests/scripts/samples.py --out tests/scripts/samples.json

Chi-square tests of every token and of every two that follow each other, Bonferroni-corrected; and a wrong rule beside
them, which the same tests must see.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from agreement import draw, no_residual, p_values, smallest

import selfspec
from selfspec import builtin
from selfspec.controllers import StaticThreshold
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.profile.shipped import find_profile_file

PROMPT, LENGTH = "def read(self", 6
SETTINGS = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.8, top-k 40, top-p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
}


ARMS = {  # candidates at each position (0: plain decoding), and the rule
    "plain": (0, None),
    "plain again": (0, None),
    "block": (1, "block"),
    "token": (1, "token"),
    "block, 3 candidates": (3, "block"),
    "planted bug": (1, no_residual),
}


def arm(job):
    """The samples of one arm at one setting."""
    setting, name, number, count = job
    torch.set_num_threads(1)
    llm = selfspec.load("builtin", profile="none")
    candidates, rule = ARMS[name]
    drafter = PlainDrafter()
    if candidates:
        skip = find_profile_file(builtin.PROFILE).skip_set
        drafter = LayerSkipDrafter(llm.runtime, skip, StaticThreshold(0.3, 4), candidates=candidates)
    seeds = range(number * count, (number + 1) * count)
    return draw(llm.runtime, drafter, llm.encode(PROMPT), LENGTH, seeds, rule=rule, **SETTINGS[setting])


def main() -> None:
    """Draw, test, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    start = time.perf_counter()
    jobs = [(setting, name, i, options.samples) for setting in SETTINGS for i, name in enumerate(ARMS)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        drawn = dict(zip([job[:2] for job in jobs], pool.imap(arm, jobs), strict=True))
    found = {}
    for setting in SETTINGS:
        plain = drawn[setting, "plain"]
        found[setting] = {}
        for name in list(ARMS)[1:]:
            p = p_values(plain, drawn[setting, name])
            found[setting][name] = {"smallest p, corrected": smallest(p), "tests": len(p)}
        found[setting]["distinct texts"] = len(set(plain))
    agree = all(
        (result["smallest p, corrected"] > 0.001) == (name != "planted bug")
        for results in found.values()
        for name, result in results.items()
        if isinstance(result, dict)
    )
    summary = {
        "claim": "sampling: the same distribution, drafted or not; and the planted bug is seen",
        "holds": agree,
        "samples": options.samples,
        "tokens_each": LENGTH,
        "seconds": round(time.perf_counter() - start),
        "versions": {"selfspec": selfspec.__version__, "torch": torch.__version__},
        "settings": found,
    }
    options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
