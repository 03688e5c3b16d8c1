"""Best score against seconds: every strategy under replay, and the paper's recipe by the clock.

    python tests/scripts/strategies.py --out tests/scripts/strategies.json   # about half an hour; nothing else running
    python tests/scripts/strategies.py --out tests/scripts/strategies.json --plot tests/scripts/strategies.png

One cost model serves all, so that scores can be compared. What is done is kept in the file, and not done again.
The recipe is Draft & Verify's: scikit-optimize's Gaussian process, cold, tokens per second of real decoding on
8 prompts x 32 tokens. Its best sets are scored by replay afterwards, to stand on the same axis.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from selfspec.search.context import SearchContext
from selfspec.search.continuations import DecodingSettings, choose
from selfspec.search.ledger import Ledger
from selfspec.search.objective import ReplayObjective, WallClockObjective
from selfspec.search.options import SearchOptions
from selfspec.search.prepare import prepare_replay
from selfspec.search.space import Space
from selfspec.search.strategies import STRATEGIES, Problem, make_strategy

import selfspec
from selfspec.basics.machine import machine
from selfspec.controllers import make_controller
from selfspec.drafters import PlainDrafter
from selfspec.measure.cost_fitting import measure_costs
from selfspec.measure.timing import interleave, method
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import SkipSet

DECODING, PROMPTS, STRATEGY = DecodingSettings(64), 8, SearchOptions.strategy


def prepared(llm, costs, seed, held):
    """What a search by replay knows before its first trial, from nothing, with the costs given."""
    os.environ["SELFSPEC_CACHE"] = tempfile.mkdtemp()
    chosen = choose(None, source="", count=PROMPTS, seed=seed)
    texts = tuple(llm.encode(prompt) for prompt in chosen.search)
    ledger = Ledger(settings={})
    ledger.keep_costs(costs)
    space = Space(llm.runtime.layers)
    return prepare_replay(SearchContext(llm, space, DECODING, texts, seed, ledger), held)


def as_dict(score, seconds):
    skip = [list(score.skip.attention), list(score.skip.mlp)]
    controller = score.controller.model_dump(mode="json")
    return {"seconds": round(seconds, 2), "score": score.speedup, "skip": skip, "controller": controller}


def run_strategy(llm, costs, costing, name, seed, trials):
    """Improvements with the seconds at which they came, and seconds in all."""
    with ExitStack() as held:
        start = time.perf_counter() - costing
        worth = prepared(llm, costs, seed, held)
        strategy = make_strategy(name, worth.problem)
        known, best = {}, []
        for _ in range(trials):
            skip = strategy.ask()
            if skip not in known:
                known[skip] = worth.objective.score(skip)
            score = known[skip]
            strategy.tell(skip, score.tokens_per_second)
            if not score.pruned and (not best or score.speedup > best[-1]["score"]):
                best.append(as_dict(score, time.perf_counter() - start))
        return {"best": best, "seconds": round(time.perf_counter() - start, 1), "trials": trials}


def run_recipe(llm, costs, minutes):
    """The paper's search; its incumbents with their seconds, scored by replay too."""
    start = time.perf_counter()
    chosen = choose(None, source="", count=8, seed=0)
    space = Space(llm.runtime.layers)
    texts = [llm.encode(p) for p in chosen.search]
    worth = WallClockObjective(llm, texts, DecodingSettings(32), ControllerSpec(name="adaptive"))
    strategy = make_strategy("skopt", Problem(space, 0))
    incumbents, trials = [], 0
    while time.perf_counter() - start < 60 * minutes:
        skip = strategy.ask()
        score = worth.score(skip)
        strategy.tell(skip, score.tokens_per_second)
        trials += 1
        if not incumbents or score.speedup > incumbents[-1][1].speedup:
            incumbents.append((time.perf_counter() - start, score))
    seconds = time.perf_counter() - start
    with ExitStack() as held:
        known = prepared(llm, costs, 0, held)
        best = []
        for at, score in incumbents:
            # Nothing compares it with another: a set of its own is never pruned.
            again = ReplayObjective(known.replay, known.costs).score(score.skip)
            best.append({**as_dict(score, at), "timed": score.speedup, "score": again.speedup})
    return {"best": best, "seconds": round(seconds, 1), "trials": trials}


def compare(llm, results):
    """Measured: the recipe's last set, the default's last, and its first that scores as well as the recipe's."""
    recipe = results["recipe"]["best"]
    mine = results[f"{STRATEGY} 0"]["best"]
    goal = recipe[-1]["score"]
    first = next((b for b in mine if b["score"] >= goal), mine[-1])
    chosen = {"recipe": recipe[-1], "default": mine[-1], "default, first as good": first}
    prompts = choose(None, source="", count=12, seed=0).measure
    methods = {"plain": method(llm, PlainDrafter(), DECODING.timed())}
    for name, one in chosen.items():
        drafter = llm.layer_skip(SkipSet(*map(tuple, one["skip"])), ControllerSpec.model_validate(one["controller"]))
        make_controller(drafter.controller.spec())
        methods[name] = method(llm, drafter, DECODING.timed())
    runs = interleave(methods, prompts, rounds=4)
    measured = {}
    for name, one in chosen.items():
        speedup, interval = runs.speedup(name, "plain")
        measured[name] = {
            "seconds": one["seconds"],
            "score": one["score"],
            "measured": round(speedup, 3),
            "interval": [round(x, 3) for x in interval],
        }
    return measured


def table(results):
    """Markdown: the median over seeds of seconds and of the score as a share of the best known for the seed."""
    known = best_known(results)
    print("| strategy | best score, share of the best known (each seed) | seconds to 95% of it | seconds in all |")
    print("|---|---|---|---|")
    for name in STRATEGIES:
        runs = {k: r for k, r in results.items() if k.rsplit(" ", 1)[0] == name}
        if not runs:
            continue
        shares, reached = [], []
        for key, run in runs.items():
            goal = known[key.rsplit(" ", 1)[1]]
            shares.append(run["best"][-1]["score"] / goal)
            reached.append(next((b["seconds"] for b in run["best"] if b["score"] >= 0.95 * goal), None))
        cells = ", ".join(f"{s:.1%}" for s in shares)
        within = ", ".join("-" if s is None else f"{s:.0f}" for s in reached)
        print(f"| {name} | {cells} | {within} | {statistics.median(r['seconds'] for r in runs.values()):.0f} |")
    if "recipe" in results:
        recipe = results["recipe"]
        share = recipe["best"][-1]["score"] / known["0"]
        print(f"| the paper's recipe | {share:.1%} | - | {recipe['seconds']:.0f} ({recipe['trials']} trials) |")
    for name, m in results.get("measured", {}).items():
        low, high = m["interval"]
        print(f"\n{name}: found after {m['seconds']:.0f} s, measured {m['measured']:.2f} ({low:.2f} to {high:.2f})")


def best_known(results):
    """The best score of any run, by seed."""
    known = {}
    for key, run in results.items():
        if "best" in run and key != "recipe":
            seed = key.rsplit(" ", 1)[1]
            known[seed] = max(known.get(seed, 0), run["best"][-1]["score"])
    return known


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    known = best_known(results)
    figure, (whole, near) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=(1, 1.3))
    styles = zip(plt.get_cmap("tab10").colors, ("-", "--", "-.", ":") * 3, strict=False)
    for name, (colour, dashes) in zip(STRATEGIES, styles, strict=False):
        runs = {key: run for key, run in results.items() if key.rsplit(" ", 1)[0] == name}
        if not runs:
            continue
        times = sorted({b["seconds"] for run in runs.values() for b in run["best"]})
        times = [t for t in times if all(run["best"][0]["seconds"] <= t for run in runs.values())]
        end = statistics.median(run["seconds"] for run in runs.values())
        times = [t for t in times if t < end]
        y = [statistics.median(share(run, known[key.rsplit(" ", 1)[1]], t) for key, run in runs.items()) for t in times]
        for axes in (whole, near):
            axes.step([*times, end], [*y, y[-1]], where="post", color=colour, ls=dashes, lw=1.6, label=name)
    if "recipe" in results:
        recipe = results["recipe"]
        x = [b["seconds"] for b in recipe["best"]] + [recipe["seconds"]]
        y = [b["score"] / known["0"] for b in recipe["best"]]
        whole.step(x, [*y, y[-1]], where="post", color="black", lw=1.6, label="the paper's recipe, by the clock")
        whole.annotate(
            "the paper's recipe,\nby the clock", (x[-1], y[-1]), (-4, -48), textcoords="offset points", ha="right"
        )
    for axes in (whole, near):
        axes.axhline(0.95, color="0.7", lw=0.8, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    whole.set(xscale="log", xlabel="seconds since the start", ylabel="best score, share of the best known")
    whole.set_xticks([3, 10, 30, 100, 300], ["3", "10", "30", "100", "300"])
    whole.minorticks_off()
    near.set(xlabel="seconds since the start", ylim=(0.9, 1.003), title="the strategies, median of the seeds")
    near.legend(frameon=False, fontsize=9, ncols=2, loc="lower right")
    figure.savefig(path, dpi=150)


def share(run, goal, seconds):
    """The best score of a run by then, as a share of the best known."""
    return max(b["score"] for b in run["best"] if b["seconds"] <= seconds) / goal


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--default-seeds", type=int, default=5, help="seeds of the default strategy and of the long run"
    )
    parser.add_argument("--long", type=int, default=120, help="trials of the long run that finds the best known score")
    parser.add_argument("--recipe-minutes", type=float, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.plot:
        table(results)
        plot(results, options.plot)
        return
    torch.set_num_threads(options.threads)
    llm = selfspec.load("builtin", profile="none")

    def keep(key, make):
        if key not in results:
            print(key, flush=True)
            results[key] = make()
            options.out.write_text(json.dumps(results) + "\n")

    def measured_costs():
        start = time.perf_counter()
        costs = measure_costs(llm.runtime, context=110, seconds=6)
        seconds = time.perf_counter() - start
        return {"machine": machine(llm.runtime.device), "seconds": seconds, "costs": costs.model_dump(mode="json")}

    keep("conditions", measured_costs)
    costs = CostModel.model_validate(results["conditions"]["costs"])
    costing = results["conditions"]["seconds"]

    def of(name, seed, trials):
        return lambda: run_strategy(llm, costs, costing, name, seed, trials)

    for seed in range(options.seeds):
        for name in STRATEGIES:
            keep(f"{name} {seed}", of(name, seed, options.trials))
    for seed in range(options.default_seeds):
        keep(f"{STRATEGY} {seed}", of(STRATEGY, seed, options.trials))
    keep("recipe", lambda: run_recipe(llm, costs, options.recipe_minutes))
    for seed in range(options.default_seeds):
        keep(f"long {seed}", of("climb", seed, options.long))
    keep("measured", lambda: compare(llm, results))
    table(results)


if __name__ == "__main__":
    main()
