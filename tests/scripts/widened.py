"""A skip set for the built-in model as if it were large: the widened model's costs, the narrow model's text.

    python tests/scripts/widened.py --layout rows --out tests/scripts/widened-8.yaml

Widening changes no output, so what would be accepted can be replayed on the narrow model, which is much faster; only
what passes cost is measured on the wide one. For `selfspec bench --widen 8 --profile tests/scripts/widened-8.yaml`.
A set is worth the geometric mean of what it is worth at each temperature.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from selfspec.search.calibration import choose, record
from selfspec.search.continuations import Decoding, continue_prompts
from selfspec.search.objective import Replayed, Score, controllers_in_play
from selfspec.search.replay import Replay
from selfspec.search.space import Space
from selfspec.search.strategies import Problem, make_strategy
from selfspec.search.warm import by_cosines, every_second, first_k, programme

import selfspec
from selfspec.facts.costs import CostModel
from selfspec.facts.draft_path import DraftPath
from selfspec.measure.cost_fitting import measure_costs
from selfspec.model.layout import LAYOUTS, lay_out_
from selfspec.model.loading import load_model
from selfspec.model.widen import widen
from selfspec.profile.draft import LayerSkipSpec
from selfspec.profile.reading import write_profile
from selfspec.profile.schema import Profile, SearchRecord
from selfspec.runtime.forward import Runtime

TEMPERATURES = (0.0, 0.8)
NEW = 64


def wide_costs(times: int, layout: str, kept: Path | None) -> CostModel:
    """Of the model widened, its weights laid out so; read from `kept` where it is there."""
    if kept is not None and kept.exists():
        return CostModel.model_validate_json(kept.read_text())
    model = widen(load_model("builtin", device="cpu", dtype="auto")[0], times)
    lay_out_(model, layout, drafting=True)
    costs = measure_costs(Runtime(model), context=110)
    if kept is not None:
        kept.write_text(costs.model_dump_json())
    return costs


def main() -> None:
    """Search, and save the best set with the curve of the last temperature."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--widen", type=int, default=8)
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--layout", default="auto", choices=("auto", *LAYOUTS), help="how the weights lie")
    parser.add_argument("--costs", type=Path, help="keep the measured costs in this file, or read them from it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    costs = wide_costs(given.widen, given.layout, given.costs)
    llm = selfspec.load(profile="none")
    prompts = [llm.encode(prompt) for prompt in choose(None, source="builtin", count=given.prompts, seed=0).search]
    space = Space(llm.runtime.layers, (), "sublayer")
    scores: dict[DraftPath, list[Score]] = {}
    with ExitStack() as held:
        replays = [
            held.enter_context(Replay(llm.model, continue_prompts(llm, prompts, d), sampler=d.sampler()))
            for d in (Decoding(NEW, temperature) for temperature in TEMPERATURES)
        ]
        worth = [Replayed(replay, costs, controllers_in_play(replay.depth)) for replay in replays]
        gains = tuple((0.0, sum(w.gain(part) for w in worth)) for part in space.variables)
        streams = replays[0].streams(6)
        planned = programme(space, streams, costs)
        near = first_k(space, by_cosines(space, streams))
        warm = tuple(dict.fromkeys((*first_k(space, gains), *planned[:3], *near[1:3], every_second(space))))
        strategy = make_strategy("climb", Problem(space, 0, warm, gains, planned))
        best = 0.0
        for trial in range(given.trials):
            path = strategy.ask()
            found = [w.score(path) for w in worth]
            value = (found[0].speedup * found[1].speedup) ** 0.5
            strategy.tell(path, value)
            if not any(score.pruned for score in found):
                scores[path] = found
            if value > best:
                best = value
                print(
                    f"{trial}: {len(path.skip)} sub-layers, {found[0].speedup:.3f} and {found[1].speedup:.3f}",
                    flush=True,
                )
    path = max(scores, key=lambda s: scores[s][0].speedup * scores[s][1].speedup)
    last = scores[path][-1]
    profile = Profile(
        model=llm.identity,
        draft=LayerSkipSpec.of(path, last.controller, candidates=last.candidates),
        acceptance=last.acceptance,
        calibration=record("builtin", prompts),
        costs=costs,
        search=SearchRecord(
            strategy="climb",
            objective="replay",
            trials=given.trials,
            seed=0,
            seconds=round(time.perf_counter() - begun, 1),
            max_new_tokens=NEW,
            temperature=TEMPERATURES[-1],
        ),
        note=f"for the built-in model widened {given.widen} times, whose costs these are",
    )
    write_profile(profile, given.out)


if __name__ == "__main__":
    main()
