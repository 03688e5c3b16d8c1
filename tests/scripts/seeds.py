"""Whether searches with different seeds find equally good paths: each found one, scored on the same texts and costs.

    python tests/scripts/seeds.py --model smollm2-135m --threads 2 --profile profiles/smollm2-135m.yaml

A search's seed draws its prompts, too. What each found, and what other profiles hold, is replayed on prompts that none
was searched on, its controller tuned there, and priced by costs measured once. Nothing else may be running.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import built_in
import torch
from selfspec.search import find_profile
from selfspec.search.continuations import DecodingSettings, continue_prompts
from selfspec.search.objective import ReplayObjective
from selfspec.search.replay import Replay

import selfspec
from selfspec.basics.machine import machine
from selfspec.measure.cost_fitting import measure_costs
from selfspec.profile.draft_spec import ProposerSpec
from selfspec.profile.reading import read_profile
from selfspec.types.draft_path import MODES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--profile", type=Path, nargs="*", default=[], help="others to hold them against")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    llm = selfspec.load(given.model, profile="none", drafting=True, quantized_drafts=True)
    print(f"{machine(llm.runtime.device)}, {given.threads} threads, {llm.runtime.dtype}, weights by {llm.layout}")
    found = {str(path): read_profile(path).path for path in given.profile}
    for seed in range(given.seeds):
        begun = time.perf_counter()
        profile = find_profile(llm, seed=seed, minutes=given.minutes, temperature=given.temperature, keep_best=True)
        found[f"seed {seed}"] = profile.path
        measured = profile.measured[0].speedup if profile.measured else float("nan")
        print(f"seed {seed}: {time.perf_counter() - begun:.0f} s, {profile.draft.summary}; measured {measured:.2f}x")
    decoding = DecodingSettings(64, given.temperature)
    texts = continue_prompts(llm, built_in.prompts(llm, "heldout", given.prompts), decoding)
    costs = measure_costs(llm.runtime, modes=MODES, sampler=decoding.sampler(), seconds=20.0)
    with Replay(llm.model, texts, sampler=decoding.sampler(), base_runtime=llm.runtime) as replay:
        scores = {
            name: ReplayObjective(replay, costs, proposers=[ProposerSpec()]).score(path).speedup
            for name, path in found.items()
        }
    best = max(scores.values())
    for name, speedup in scores.items():
        print(json.dumps({"path": name, "predicted": round(speedup, 3), "share of the best": round(speedup / best, 3)}))


if __name__ == "__main__":
    main()
