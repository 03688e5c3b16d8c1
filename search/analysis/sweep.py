"""Speedup against the number of skipped sub-layers: families of skip sets, predicted, bounded and measured."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from selfspec.llm.llm import LLM
from selfspec.text.prompt_files import Prompts
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import WORDS, HeadMode, SkipSet

from ..ledger import Ledger
from ..objective import Score
from ..strategies import Greedy
from ..study import find_profile
from ..trial_tables import pareto, sensitivity_frame
from ..warm_starts import every_second
from .workbench import Workbench

RANDOM, GREEDY, EVERY_SECOND = "random sets", "greedy elimination", "every second layer"
FRONT, CHOSEN = "search's front", "chosen profile"
ATTENTION, MLP = "attention alone", "MLP alone"


def sweep(bench: Workbench, *, counts: Sequence[int] | None = None, each: int = 2, seed: int = 0) -> pd.DataFrame:
    """Score families of skip sets; return a row for each set.

    `counts`: the numbers of skipped sub-layers (None: up to three quarters of all, in steps of two); `each`: the
    number of random sets of each count. Columns: `family`, `temperature`, `skipped`, `attention` and `mlp` (skipped),
    `speedup` (predicted, over plain decoding), `acceptance_rate`, `tokens_per_round`, `draft_cost` (a draft step as a
    share of a plain step), `bound` (the speedup if every draft ended at the best position; only for greedy elimination,
    as it takes longest), `score` (the `Score`), `rest` (as text, the mode of the sub-layers that are not skipped).
    """
    counts = range(2, 3 * len(bench.space) // 4 + 1, 2) if counts is None else sorted(counts)
    sets = _sets(bench, counts, each, seed)
    return pd.DataFrame([row(bench, family, bench.score(skip), bound=family == GREEDY) for family, skip in sets])


def row(bench: Workbench, family: str, score: Score, *, bound: bool = True) -> dict[str, object]:
    """Return the row of `sweep` for a scored path; `bound`: whether to compute its bound."""
    return {
        "family": family,
        "temperature": bench.temperature,
        "rest": f"the rest {WORDS[bench.rest]}",
        "skipped": len(score.skip),
        "attention": len(score.skip.attention),
        "mlp": len(score.skip.mlp),
        "speedup": score.speedup,
        "acceptance_rate": score.acceptance_rate,
        "tokens_per_round": score.tokens_per_round,
        "draft_cost": bench.draft_cost(score.path),
        "bound": bench.bound(score.path).speedup if bound else None,
        "score": score,
    }


def _sets(bench: Workbench, counts: Sequence[int], each: int, seed: int) -> Iterator[tuple[str, SkipSet]]:
    space, gains = bench.space, bench.problem.gains
    draw = random.Random(seed)
    for count in counts:
        for _ in range(each):
            yield RANDOM, random_set(bench, count, draw)
    yield from ((GREEDY, skip) for skip in elimination(bench, counts))
    halved = every_second(space).skip
    for share in (4, 2, 1):  # every eighth layer, every fourth, every second
        layers = halved.attention[share - 1 :: share]
        yield EVERY_SECOND, SkipSet(layers, layers)
    for family, part in ((ATTENTION, "attention"), (MLP, "mlp")):
        ranked = sorted((i for i, name in enumerate(space.names) if name.startswith(part)), key=lambda i: -gains[i][-1])
        for count in counts:
            if count <= len(ranked):
                yield family, space.choose(ranked[:count]).skip


def random_set(bench: Workbench, count: int, draw: random.Random) -> SkipSet:
    """Return a random skip set of `count` sub-layers."""
    return bench.space.choose(draw.sample(range(len(bench.space)), count)).skip


def elimination(bench: Workbench, counts: Iterable[int]) -> Iterator[SkipSet]:
    """Yield a skip set of each size in `counts` by greedy elimination.

    Each step skips the sub-layer whose skipping leaves the highest speed.

    The elimination is lazy (Minoux 1978): a sub-layer is scored again only when its last score is the most promising.
    """
    wanted = set(counts)
    strategy = Greedy(bench.space, seed=bench.seed, gains=bench.problem.gains)
    while wanted and not strategy.done:
        path = strategy.ask()
        strategy.tell(path, bench.score(path).speedup)
        if (taken := len(strategy.base.skip)) in wanted:
            wanted.discard(taken)
            yield strategy.base.skip


def measure_rows(bench: Workbench, rows: pd.DataFrame, *, rounds: int = 2) -> pd.DataFrame:
    """Return rows of a `sweep` with the measured speedup over plain decoding, in columns `measured`, `low` and `high`.

    The columns are the median over held-out prompts and its 95% bootstrap interval; all runs are interleaved.
    """
    measured = bench.measure([bench.profile(score) for score in rows["score"]], bench.held_out, rounds=rounds)
    return rows.join(pd.DataFrame(measured, columns=["measured", "low", "high"], index=rows.index))


def representatives(rows: pd.DataFrame, *, each: int = 3) -> pd.DataFrame:
    """Return `each` rows or fewer of every family: the fastest row by prediction, and rows spread over the counts."""
    picked: list[int] = []
    for _, family in rows.groupby("family", sort=False):
        ordered = family.sort_values("skipped")
        spread = [round(i * (len(ordered) - 1) / max(each - 2, 1)) for i in range(each - 1)]
        picked += [family["speedup"].idxmax(), *ordered.index[spread]]
    return rows.loc[list(dict.fromkeys(picked))]


@dataclass(frozen=True)
class Speedups:
    """The results of `speedups`: rows of `sweep`, some with measurements, and sensitivity frames.

    `sensitivity`: the result of `sensitivity_frame` for each temperature and mode `rest`.
    """

    rows: pd.DataFrame
    sensitivity: dict[tuple[float, HeadMode], pd.DataFrame]


def speedups(
    llm: LLM,
    prompts: Sequence[str] | Prompts | None = None,
    *,
    temperatures: Sequence[float] = (0.0, 0.8),
    rests: Sequence[HeadMode] = ("full",),
    count: int = 8,
    max_new_tokens: int = 64,
    counts: Sequence[int] | None = None,
    each: int = 3,
    trials: int = 60,
    rounds: int = 2,
    seed: int = 0,
    costs: CostModel | None = None,
) -> Speedups:
    """Return the data of plots of the speedup against the number of skipped sub-layers, at several temperatures.

    Sub-layers that are not skipped draft in each mode of `rests`. The rows are those of a `sweep`, and of the Pareto
    front (acceptance against draft cost) and the profile of a search with `trials` trials on the same texts. Some rows
    of every family are measured in `rounds` rounds (0: none). With `costs`, the cost model of another machine or model,
    nothing is measured or searched: texts and drafts are those of `llm`, and speeds follow from `costs`.
    """
    rows: list[pd.DataFrame] = []
    sensitivity = {}
    for temperature, rest in product(temperatures, rests):
        how: dict[str, Any] = {
            "count": count,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        profile, front = None, list[Score]()
        if costs is None and trials:
            with TemporaryDirectory() as folder:
                searched = how | {"trials": trials, "storage": Path(folder) / "trials.jsonl"}
                profile = find_profile(llm, prompts, modes=f"{rest},skip", drafters="none", keep_best=True, **searched)
                front = [entry.score for entry in pareto(Ledger(searched["storage"], None).entries)]
        known = costs if profile is None else profile.costs
        with Workbench(llm, prompts, costs=known, rest=rest, **how) as bench:
            frame = sweep(bench, counts=counts, each=each, seed=seed)
            others = [row(bench, FRONT, bench.score(score.path), bound=False) for score in front]
            if profile is not None:
                others.append(row(bench, CHOSEN, bench.score(profile.path)))
            frame = pd.concat([frame, pd.DataFrame(others)], ignore_index=True) if others else frame
            if rounds and costs is None:
                measured = measure_rows(bench, representatives(frame), rounds=rounds)
                frame = frame.join(measured[["measured", "low", "high"]])
            rows.append(frame)
            sensitivity[temperature, rest] = sensitivity_frame(bench.ledger)
    return Speedups(pd.concat(rows, ignore_index=True), sensitivity)
