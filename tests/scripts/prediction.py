"""Predicted against measured speedup, for random skip sets of the built-in model on held-out prompts.

    python tests/scripts/prediction.py [--temperature 0.8]   # about 4 minutes; nothing else running

The costs are measured before and after; predictions are made with both and averaged, since a shared machine's speed
drifts. All sets and plain decoding are interleaved.
"""

from __future__ import annotations

import argparse
import random
import statistics

import torch
from selfspec.search.continuations import Decoding, continue_prompts
from selfspec.search.objective import predict
from selfspec.search.replay import Replay

import selfspec
from selfspec import builtin
from selfspec.basics.machine import machine
from selfspec.controllers import StaticThreshold
from selfspec.drafters import PlainDrafter
from selfspec.facts.skip import SkipSet
from selfspec.measure.cost_fitting import measure_costs
from selfspec.measure.timing import interleave, method
from selfspec.profile.draft import LayerSkipSpec
from selfspec.profile.schema import Profile


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llm = selfspec.load(profile="none")
    draw = random.Random(options.seed)
    layers = llm.runtime.layers
    skips = []
    for _ in range(options.sets):
        rate = draw.uniform(0.1, 0.55)
        skips.append(SkipSet.from_bits([draw.random() < rate for _ in range(2 * layers)]))
    decoding, controller = Decoding(64, options.temperature), StaticThreshold(0.5, 6)
    prompts = builtin.prompts("heldout")[: options.prompts]
    texts = continue_prompts(llm, [llm.encode(p) for p in prompts], decoding, seed=options.seed)
    context = round(statistics.mean(text.prompt + text.new / 2 for text in texts))
    costs = [measure_costs(llm.runtime, context=context, sampler=decoding.sampler(), seconds=4)]
    drafters = {str(i): llm.layer_skip(skip, controller.spec()) for i, skip in enumerate(skips)}
    methods = {name: method(llm, drafter, decoding.options()) for name, drafter in drafters.items()}
    plain = method(llm, PlainDrafter(), decoding.options())
    runs = interleave({"plain": plain, **methods}, prompts, rounds=options.rounds)
    costs.append(measure_costs(llm.runtime, context=context, sampler=decoding.sampler(), seconds=4, seed=1))
    print(f"{machine(llm.runtime.device)}; {options.threads} thread(s); {llm.runtime.dtype}; temperature", end=" ")
    print(f"{options.temperature:g}; error of draft steps on fresh sets {', '.join(f'{c.error:.1%}' for c in costs)}")
    print("| skipped | draft cost | tokens a pass: replay, real | predicted | measured | predicted / measured |")
    print("|---|---|---|---|---|---|")
    ratios = []
    with Replay(llm.model, texts, sampler=decoding.sampler(), depth=controller.k_max, seed=options.seed) as replay:
        for i, skip in enumerate(skips):
            profile = Profile(model=llm.identity, draft=LayerSkipSpec.of(skip, controller.spec()))
            both = [predict(replay, profile.model_copy(update={"costs": c})) for c in costs]
            predicted = statistics.mean(p.speedup for p in both)
            total, base = runs.total(str(i)), runs.total("plain")
            measured = total.tokens_per_second / base.tokens_per_second
            ratios.append(predicted / measured)
            print(
                f"| {len(skip)} | {statistics.mean(p.draft_cost for p in both):.2f} | {both[0].tokens_per_round:.2f}, "
                f"{total.tokens_per_round:.2f} | {predicted:.2f} | {measured:.2f} | {ratios[-1]:.2f} |"
            )
    far = max(abs(ratio - 1) for ratio in ratios)
    beyond = sum(abs(ratio - 1) > 0.1 for ratio in ratios)
    print(f"\nmean {statistics.mean(ratios):.3f}; farthest off {far:.1%}; {beyond} beyond 10%")


if __name__ == "__main__":
    main()
