"""Compare strategies over time, the importance of sub-layers, and predictions with measurements."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import optuna
import pandas as pd

from selfspec.measure.cost_fitting import measure_path_costs
from selfspec.types.skip import SkipSet

from ..objective import predict
from ..strategies import STRATEGIES, make_strategy
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
