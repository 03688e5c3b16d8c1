"""Analyses of trials and traces: strategies, sub-layers, predictions, thresholds, draft lengths and controllers."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import optuna
import pandas as pd

from selfspec.controllers import CONTROLLERS, Controller, FixedK
from selfspec.measure.cost_fitting import measure_path_costs
from selfspec.types.draft_path import SkipSet

from ..fits import Drafted, drafted
from ..objective import ReplayObjective, predict
from ..oracle import oracle_bound
from ..strategies import STRATEGIES, make_strategy
from ..trace import Trace, steps, walk
from .sweep import random_set
from .workbench import Workbench


def race(
    bench: Workbench, *, strategies: Sequence[str] = tuple(STRATEGIES), trials: int = 40, seeds: Sequence[int] = (0,)
) -> pd.DataFrame:
    """Run every strategy with the same texts, costs, gains and warm starts; return a row for each trial.

    Columns: `strategy`, `seed`, `trial` (from 1), `seconds` (since the first `ask`, the time of the strategy included),
    `speedup` (predicted, over plain decoding; for a pruned trial, from the share that was replayed), `pruned`, `best`
    (the best speedup so far), `skip`.
    """
    rows = []
    for seed in seeds:
        for name in strategies:
            objective, strategy = bench.objective(), make_strategy(name, replace(bench.problem, seed=seed))
            known: dict[SkipSet, tuple[float, float, bool]] = {}
            best, begun = 0.0, time.perf_counter()
            for trial in range(1, trials + 1):
                path = strategy.ask()
                skip = path.skip
                if skip not in known:
                    score = objective.score(path)
                    known[skip] = score.tokens_per_second, score.speedup, score.pruned
                speed, speedup, pruned = known[skip]
                strategy.tell(path, speed)
                best = best if pruned else max(best, speedup)
                seconds = time.perf_counter() - begun
                rows.append((name, seed, trial, seconds, speedup, pruned, best, skip))
    return pd.DataFrame(rows, columns=["strategy", "seed", "trial", "seconds", "speedup", "pruned", "best", "skip"])


def importance(bench: Workbench, trials: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """Return the importance of each sub-layer for the speedups of a `race`: Optuna's fANOVA (Hutter et al. 2014).

    Columns: `layer`, `part`, `importance` (adds up to 1), `effect` (the mean speedup of the trials that skipped the
    sub-layer, less the mean of all other trials; NaN if either group is empty). Every skip set counts once.
    """
    distinct = trials.drop_duplicates("skip")
    bits = pd.DataFrame([bench.space.point(skip) for skip in distinct["skip"]], columns=list(bench.space.names)) > 0
    study, bit = optuna.create_study(direction="maximize"), optuna.distributions.IntDistribution(0, 1)
    for speedup, point in zip(distinct["speedup"], bits.astype(int).to_dict("records"), strict=True):
        study.add_trial(optuna.trial.create_trial(value=speedup, params=point, distributions=dict.fromkeys(point, bit)))
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=seed)
    importances = optuna.importance.get_param_importances(study, evaluator=evaluator)
    speedups = distinct["speedup"].reset_index(drop=True)
    rows = []
    for name in bench.space.names:
        part, layer = name.split()
        effect = speedups[bits[name]].mean() - speedups[~bits[name]].mean()
        rows.append((int(layer), part, importances.get(name, 0.0), effect))
    return pd.DataFrame(rows, columns=["layer", "part", "importance", "effect"])


def predictions(bench: Workbench, *, sets: int = 8, rounds: int = 2, seed: int = 0) -> pd.DataFrame:
    """Measure random skip sets by real decoding of the prompts that their speed was predicted on.

    Columns: `temperature`, `skipped`, `predicted` and `measured` (speedup over plain decoding, prefill included), `low`
    and `high` (95% bootstrap interval over prompts).
    """
    profiles = [bench.profile(bench.score(skip)) for skip in random_sets(bench, sets, seed)]
    rows = [
        (bench.temperature, len(profile.skip_set), predict(bench.replay, profile).speedup, *measured)
        for profile, measured in zip(profiles, bench.measure(profiles, bench.prompts, rounds=rounds), strict=True)
    ]
    return pd.DataFrame(rows, columns=["temperature", "skipped", "predicted", "measured", "low", "high"])


def cost_fit(bench: Workbench, *, sets: int = 8, seed: int = 0) -> pd.DataFrame:
    """Compare the cost model's draft steps with timed ones, on random skip sets that it was not fitted to.

    Columns: `attention` and `mlp` (how many such sub-layers run), `predicted` and `timed` (a draft step as a share of
    a plain step; both steps are timed together, because the speed of a machine drifts).
    """
    rows = []
    layers, costs = bench.space.layers, bench.costs
    for skip in random_sets(bench, sets, seed):
        timed = measure_path_costs(
            bench.llm.runtime, skip, context=costs.context, sampler=bench.decoding.sampler(), seed=seed
        )
        counts = layers - len(skip.attention), layers - len(skip.mlp)
        rows.append((*counts, costs.draft_share(skip, layers), timed.base / timed.plain))
    return pd.DataFrame(rows, columns=["attention", "mlp", "predicted", "timed"])


def verification_costs(bench: Workbench) -> pd.DataFrame:
    """Return the cost of a verification pass by its rows. Columns: `rows`, `share` (of a pass over one row)."""
    costs = bench.costs
    return pd.DataFrame({"rows": costs.widths, "share": [v / costs.verify[0] for v in costs.verify]})


def random_sets(bench: Workbench, count: int, seed: int) -> list[SkipSet]:
    """Return `count` random skip sets, each of a tenth to six tenths of the sub-layers."""
    draw, n = random.Random(seed), len(bench.space)
    return [random_set(bench, draw.randint(max(1, n // 10), 6 * n // 10), draw) for _ in range(count)]


Z = 1.96  # standard errors in half a 95% interval


def rounds_frame(traces: Sequence[Trace], controller: Controller, *, candidates: int = 1) -> pd.DataFrame:
    """Return a row for each round of decoding the texts in order; the controller learns from text to text.

    Columns: `text` (index), `round` (of the text, from 1), `drafted` and `accepted` (numbers of tokens), `candidates`
    (tokens verified at all positions, drafted tokens included), `other` (whether another candidate matches the text at
    the first wrong token), `emitted` (number of tokens), `threshold` (after the round; empty for a controller without a
    threshold).
    """
    state = controller.start()
    rows = []
    for text, trace in enumerate(traces):
        for number, step in enumerate(steps(trace, state, candidates=candidates), 1):
            threshold = state.spec().options.get("threshold")
            drafted = len(step.confidences)
            rows.append(
                (text, number, drafted, step.num_accepted, step.candidates, step.other, step.emitted, threshold)
            )
    columns = ["text", "round", "drafted", "accepted", "candidates", "other", "emitted", "threshold"]
    return pd.DataFrame(rows, columns=columns)


def drafted_tokens(traces: Sequence[Trace]) -> pd.DataFrame:
    """Return a row for each drafted token whose predecessors in its draft all match the text.

    Columns: `place` (position in the draft, from 1), `confidence`, `accepted`, `rank` (for a rejected token, the
    candidate that is the text's token: 1 for the second candidate; 0: accepted, or no known candidate).
    """
    tokens = pd.DataFrame([token for trace in traces for token in drafted(trace)], columns=list(Drafted._fields))
    return tokens[["place", "confidence", "accepted", "rank"]]


def acceptance_by(tokens: pd.DataFrame, column: str, *, bins: int = 12) -> pd.DataFrame:
    """Return the acceptance rate of `drafted_tokens` by `place`, or by `confidence` in bins of equally many tokens.

    Columns: `column` (the bin's mean), `accepted` (the share), `low` and `high` (95%, Wilson 1927), `tokens`.
    """
    by = tokens[column]
    if column != "place":
        by = pd.qcut(by.rank(method="first"), min(bins, len(tokens)), labels=False)
    grouped = tokens.groupby(by, sort=True)
    n, share = grouped.size().to_numpy(), grouped["accepted"].mean().to_numpy()
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * np.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return pd.DataFrame(
        {
            column: grouped[column].mean().to_numpy(),
            "accepted": share,
            "low": np.minimum(middle - half, share),
            "high": np.maximum(middle + half, share),
            "tokens": n,
        }
    )


def best_lengths(bench: Workbench, skips: Sequence[SkipSet], *, most: int = 8) -> pd.DataFrame:
    """Return the best fixed draft length and its speedup: by theory at each acceptance rate, and on skip sets' traces.

    Theory is Leviathan et al. (2211.17192): every token is accepted with the same chance. The costs are those of the
    workbench's cost model; in theory, a draft step has the median cost over the skip sets. `most`: the longest draft.
    Columns: `source` (theory or trace), `acceptance` (the chance that a token is accepted if all tokens before it are),
    `k` (the best draft length; 0: no drafting), `speedup`.
    """
    costs, layers = bench.costs, bench.space.layers
    typical = float(np.median([costs.draft(skip, layers) for skip in skips]))
    rows: list[tuple[str, float, int, float]] = []
    for a in np.linspace(0.02, 0.98, 49):
        emitted = [sum(a**i for i in range(k + 1)) for k in range(most + 1)]
        seconds = [costs.round + k * typical + costs.verification(k + 1) for k in range(most + 1)]
        k = int(np.argmax([e / s for e, s in zip(emitted, seconds, strict=True)]))
        rows.append(("theory", float(a), k, emitted[k] * costs.plain / seconds[k]))
    for skip in skips:
        traces, draft = bench.traces(skip), costs.draft(skip, layers)
        acceptance = float(drafted_tokens(traces)["accepted"].mean())
        speedups = [(0, 1.0), *((k, _speedup(bench, traces, FixedK(k), draft)) for k in range(1, most + 1))]
        rows.append(("trace", acceptance, *max(speedups, key=lambda each: each[1])))
    return pd.DataFrame(rows, columns=["source", "acceptance", "k", "speedup"])


def compare_controllers(bench: Workbench, skip: SkipSet) -> pd.DataFrame:
    """Compare all kinds of controllers, with options tuned on the workbench's texts, at each number of candidates.

    Columns: `controller`, `candidates` (the most for each position), `speedup` (predicted, over plain
    decoding), `bound` (the speedup if every draft ended at the best position), `acceptance_rate`, `tokens_per_round`,
    `options`.
    """
    draft, traces = bench.costs.draft(skip, bench.space.layers), bench.traces(skip)
    kinds = {kind: [c for c in bench.controllers if c.name == kind] for kind in CONTROLLERS}
    rows = []
    for candidates in range(1, bench.replay.candidates + 1):
        bound = oracle_bound(traces, bench.costs, draft, candidates=candidates).speedup
        for kind, playing in kinds.items():
            score = ReplayObjective(bench.replay, bench.costs, playing, candidates=candidates).score(skip)
            rates = score.acceptance_rate, score.tokens_per_round
            rows.append((kind, candidates, score.speedup, bound, *rates, score.controller.options))
    columns = ["controller", "candidates", "speedup", "bound", "acceptance_rate", "tokens_per_round", "options"]
    return pd.DataFrame(rows, columns=columns)


def _speedup(bench: Workbench, traces: Sequence[Trace], controller: Controller, draft: float) -> float:
    walks = walk(traces, controller, seeded=bench.replay.seeded)
    tokens = sum(done.stats.tokens for done in walks)
    prices = bench.costs.call_costs(draft)
    return tokens * bench.costs.plain / sum(bench.costs.seconds(done.rounds, prices) for done in walks)
