"""Predicted against measured speedup, for random draft paths on held-out prompts.

    python tests/scripts/prediction.py [--temperature 0.8]   # about 4 minutes; nothing else running
    python tests/scripts/prediction.py --model smollm2-135m --modes int8,int4,skip --threads 2

The costs are measured before and after; predictions are made with both and averaged, since a shared machine's speed
drifts. All sets and plain decoding are interleaved.
"""

from __future__ import annotations

import argparse
import random
import statistics

import built_in
import torch
from selfspec.search.continuations import DecodingSettings, continue_prompts
from selfspec.search.objective import predict
from selfspec.search.replay import Replay

import selfspec
from selfspec.basics.machine import machine
from selfspec.controllers import StaticThreshold
from selfspec.drafters import PlainDrafter
from selfspec.measure.cost_fitting import measure_costs
from selfspec.measure.timing import interleave, method
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.types.draft_path import LOW, DraftPath, Mode


def random_path(draw: random.Random, layers: int, modes: list[Mode]) -> DraftPath:
    """Some sub-layers are skipped, at a rate of its own; the rest run in full, or quantised if the modes allow it."""
    rate = draw.uniform(0.1, 0.55) if modes == ["skip"] else draw.uniform(0, 0.15)
    rest: list[Mode] = [mode for mode in modes if mode in LOW] or ["full"]
    skipped = "skip" in modes
    of = [draw.choice(rest) if draw.random() >= rate or not skipped else "skip" for _ in range(2 * layers)]
    return DraftPath.from_modes(of, head="int8" if "int8" in modes else "full")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--modes", default="skip", help="what sub-layers may do but run in full: int8,int4,skip")
    parser.add_argument("--sets", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    modes = options.modes.split(",")
    low = any(mode in LOW for mode in modes)
    llm = selfspec.load(options.model, profile="none", drafting=True, quantized_drafts=low)
    draw = random.Random(options.seed)
    paths = [random_path(draw, llm.runtime.layers, modes) for _ in range(options.sets)]
    decoding, controller = DecodingSettings(64, options.temperature), StaticThreshold(0.5, 6)
    prompts = built_in.prompts(llm, "heldout", options.prompts)
    texts = continue_prompts(llm, prompts, decoding, seed=options.seed)
    context = round(statistics.mean(text.prompt_length + text.num_new_tokens / 2 for text in texts))
    measured = {"context": context, "sampler": decoding.sampler(), "seconds": 20 if low else 4}
    costs = [measure_costs(llm.runtime, modes=("full", *modes), **measured)]
    drafters = {str(i): llm.layer_skip(path, controller.spec()) for i, path in enumerate(paths)}
    methods = {name: method(llm, drafter, decoding.timed()) for name, drafter in drafters.items()}
    plain = method(llm, PlainDrafter(), decoding.timed())
    runs = interleave({"plain": plain, **methods}, prompts, rounds=options.rounds)
    costs.append(measure_costs(llm.runtime, modes=("full", *modes), seed=1, **measured))
    print(f"{machine(llm.runtime.device)}; {options.threads} thread(s); {llm.runtime.dtype}; temperature", end=" ")
    print(f"{options.temperature:g}; error of draft steps on fresh paths {', '.join(f'{c.error:.1%}' for c in costs)}")
    print("| path | draft cost | tokens a pass: replay, real | predicted | measured | predicted / measured |")
    print("|---|---|---|---|---|---|")
    ratios = []
    replay = Replay(
        llm.model,
        texts,
        sampler=decoding.sampler(),
        depth=controller.k_max,
        seed=options.seed,
        base_runtime=llm.runtime,
    )
    with replay:
        for i, path in enumerate(paths):
            profile = Profile(model=llm.identity, draft=LayerSkipSpec.from_path(path, controller.spec()))
            both = [predict(replay, profile.model_copy(update={"costs": c})) for c in costs]
            predicted = statistics.mean(p.speedup for p in both)
            total, base = runs.total(str(i)), runs.total("plain")
            real = total.tokens_per_second / base.tokens_per_second
            ratios.append(predicted / real)
            print(
                f"| {path.summary} | {statistics.mean(p.draft_cost for p in both):.2f} | "
                f"{both[0].tokens_per_round:.2f}, {total.tokens_per_round:.2f} | {predicted:.2f} | "
                f"{real:.2f} | {ratios[-1]:.2f} |"
            )
    off = [abs(ratio - 1) for ratio in ratios]
    beyond = sum(error > 0.1 for error in off)
    print(f"\nmean {statistics.mean(ratios):.3f}; median error {statistics.median(off):.1%}; farthest off", end=" ")
    print(f"{max(off):.1%}; {beyond} beyond 10%")


if __name__ == "__main__":
    main()
