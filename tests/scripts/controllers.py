"""Controllers compared: tuned on calibration text, then on held-out text by the same traces, and in real runs.

    python tests/scripts/controllers.py --out tests/scripts/controllers.json

For the built-in model with its shipped skip set, greedy and at temperature 0.8, chains and with up to 4 candidates for
each position: predicted speedup over plain decoding (prompt included), measured speedup (interleaved), and the bound of
perfect stopping on the held-out trace. With `--profile` another skip set, whose own costs are used where it has them,
and nothing is measured: so for a model that is not this one, such as the widened one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from selfspec.search.continuations import DecodingSettings, continue_prompts
from selfspec.search.finalists import profile_from_score
from selfspec.search.objective import ReplayObjective, controllers_in_play, predict
from selfspec.search.oracle import oracle_bound
from selfspec.search.replay import CANDIDATES, Replay

import selfspec
from selfspec import builtin
from selfspec.controllers import CONTROLLERS, FixedK
from selfspec.drafters import PlainDrafter
from selfspec.measure.cost_fitting import measure_costs
from selfspec.measure.timing import conditions, interleave, method
from selfspec.profile.shipped import find_profile_file

PROMPTS, NEW, ROUNDS = 8, 64, 2


def main() -> None:
    """Both temperatures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    llm = selfspec.load("builtin", profile="none", drafting=True)
    base = find_profile_file(given.profile or builtin.PROFILE)
    found: dict[str, Any] = {**conditions(llm.runtime), "skipped": len(base.skip_set), "temperatures": {}}
    for temperature in (0.0, 0.8):
        decoding = DecodingSettings(NEW, temperature)
        costs = base.costs if given.profile else None
        if costs is None:
            costs = measure_costs(llm.runtime, context=110, sampler=decoding.sampler())
        with ExitStack() as held:
            tuning, fresh = (
                [
                    held.enter_context(
                        Replay(
                            llm.model,
                            continue_prompts(llm, [llm.encode(p) for p in prompts], decoding),
                            sampler=decoding.sampler(),
                            candidates=candidates,
                        )
                    )
                    for candidates in (1, CANDIDATES)
                ]
                for prompts in (builtin.prompts("calibration")[:PROMPTS], builtin.prompts("heldout")[-PROMPTS:])
            )
            rows: dict[str, Any] = {}
            profiles = {}
            for tuned, other, candidates in zip(tuning, fresh, (1, CANDIDATES), strict=True):
                for kind in CONTROLLERS:
                    playing = [c for c in controllers_in_play(tuned.depth) if c.spec().name == kind]
                    score = ReplayObjective(tuned, costs, playing).score(base.skip_set)
                    name = f"{kind}, {'chain' if candidates == 1 else 'candidates'}"
                    profiles[name] = profile_from_score(base.model_copy(update={"costs": costs}), score)
                    predicted = predict(other, profiles[name])
                    rows[name] = {
                        "controller": score.controller.model_dump(mode="json"),
                        "candidates": score.candidates,
                        "tuned": score.speedup,
                        "predicted": predicted.speedup,
                        "tokens_per_round": predicted.tokens_per_round,
                    }
            traces = fresh[1].trace(base.skip_set, [FixedK(fresh[1].depth)])
            draft = costs.draft(base.skip_set, llm.runtime.layers)
            bounds = {n: oracle_bound(traces, costs, draft, candidates=n).speedup for n in (1, CANDIDATES)}
        if given.profile is None:
            options = decoding.timed()
            methods = {name: method(llm, llm.drafter_for(profile), options) for name, profile in profiles.items()}
            methods["plain"] = method(llm, PlainDrafter(), options)
            runs = interleave(methods, builtin.prompts("heldout")[-PROMPTS:], rounds=ROUNDS)
            for name, row in rows.items():
                speedup, (low, high) = runs.speedup(name, "plain")
                row["measured"] = [speedup, low, high]
                row["mean"] = statistics.mean(runs.ratios(name, "plain"))
        found["temperatures"][str(temperature)] = {"rows": rows, "bound": bounds, "c": draft / costs.plain}
        for name, row in rows.items():
            real = " measured {:.2f} ({:.2f}-{:.2f})".format(*row["measured"]) if "measured" in row else ""
            print(
                f"{temperature:g} {name:22} tuned {row['tuned']:.3f} predicted {row['predicted']:.3f}{real} "
                f"{row['tokens_per_round']:.2f} tokens a pass, {row['candidates']} candidates",
                flush=True,
            )
        print(f"{temperature:g} bounds {bounds}", flush=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
