"""A benchmark's figures from its runs: ratios, latencies, acceptance, and what formulas make of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean, median
from typing import TYPE_CHECKING

from selfspec.basics.checked_model import Json
from selfspec.measure.agreement import Verdict, counted
from selfspec.types.costs import CostModel
from selfspec.types.stats import Round, acceptance_by_position

if TYPE_CHECKING:
    from selfspec.measure.timing import Runs


def summary(runs: Runs, name: str, *, bases: Sequence[str]) -> Json:
    """What a method did: speed, ratios to `bases` with intervals, latencies in seconds, what its rounds gave.

    Tokens that are given out together share the time since the emission before: that is their inter-token latency.
    `draft_cost`: seconds of drafting for each drafted token, in steps of plain decoding, where both were run.
    """
    total = runs.total(name)
    step = _step(runs)
    each = [run for prompt in runs.stats[name] for run in prompt]
    return {
        "tokens_per_second": total.tokens_per_second,
        "ratio": _ratios(runs, name, bases),
        "first_token_seconds": _quantiles([run.log[0].seconds for run in each if run.log]),
        "inter_token_seconds": _quantiles(
            [done.seconds / done.tokens for run in each for done in run.log[1:] for _ in range(done.tokens)]
        ),
        "emission_seconds": _quantiles([done.seconds for run in each for done in run.log[1:]]),
        "tokens_per_round": total.tokens_per_round,
        "accepted_per_round": total.accepted / total.rounds if total.rounds else 0.0,
        "acceptance_rate": total.acceptance_rate if total.drafted else None,
        "draft_cost": total.drafting / total.drafted / step if total.drafting and total.drafted and step else None,
        "sources": total.shares,
        "acceptance_by_position": acceptance_by_position([done for run in each for done in run.log]),
    }


def _step(runs: Runs) -> float | None:
    """Seconds of a step of plain decoding, by the median of those after a text's first."""
    each = (run for prompt in runs.stats.get("plain", ()) for run in prompt)
    seconds = [done.seconds for run in each for done in run.log[1:]]
    return median(seconds) if seconds else None


def by_task(
    runs: Runs, name: str, tasks: Sequence[str], *, bases: Sequence[str], verdicts: Sequence[Verdict] | None
) -> Json:
    """A method's figures for each task and for all prompts, where `tasks` and `verdicts` are the prompts' own.

    Those of Spec-Bench, as its `evaluation/speed.py` has them: `mean_accepted_tokens`, emitted tokens a pass over all
    passes; `mean_tokens_per_second`, the mean over prompts of each one's tokens per second, prompt's pass included; and
    `speedup`, that mean over a base's. With several rounds, the mean of the rounds' figures. And `ratio`, as in
    `summary`; `sources`: the share of the tokens that each source came up with, as far as it is told.
    """
    found: Json = {"tasks": []}
    for task in dict.fromkeys(tasks):
        mine = [index for index, of in enumerate(tasks) if of == task]
        some = None if verdicts is None else [verdicts[index] for index in mine]
        found["tasks"].append({"task": task, **_on_prompts(runs.of(mine), name, bases, some)})
    return {**found, "overall": _on_prompts(runs, name, bases, verdicts)}


def _on_prompts(runs: Runs, name: str, bases: Sequence[str], verdicts: Sequence[Verdict] | None) -> Json:
    mine, total = runs.mean_speeds(name), runs.total(name)
    return {
        "prompts": len(runs.stats[name]),
        "mean_accepted_tokens": total.tokens_per_round,
        "sources": total.shares,
        "mean_tokens_per_second": mean(mine),
        "speedup": {base: mean(a / b for a, b in zip(mine, runs.mean_speeds(base), strict=True)) for base in bases},
        "ratio": _ratios(runs, name, bases),
        "same_text": None if verdicts is None else counted(verdicts),
    }


def _ratios(runs: Runs, name: str, bases: Sequence[str]) -> Json:
    ratios = {}
    for base in bases:
        ratio, (low, high) = runs.speedup(name, base)
        ratios[base] = {"median": ratio, "low": low, "high": high}
    return ratios


def theory(rounds: Sequence[Round], costs: CostModel) -> float:
    """Speedup over plain decoding were every drafted token accepted alike and every draft of the mean length.

    E / (g * c + v(g + 1)) with E = (1 - a^(g + 1)) / (1 - a) (Leviathan et al. 2211.17192, with v(w) in place of 1).
    The chance a is that of a token all before which were accepted.
    """
    drafted, n = sum(done.drafted for done in rounds), len(rounds)
    if not drafted:
        return 1.0
    accepted = sum(done.accepted for done in rounds)
    a = accepted / (accepted + sum(done.accepted < done.drafted for done in rounds))
    g = drafted / n
    tokens = g + 1 if a == 1 else (1 - a ** (g + 1)) / (1 - a)
    low = int(g)
    verification = (1 - (g - low)) * costs.verification(low + 1) + (g - low) * costs.verification(low + 2)
    return tokens * costs.plain / (costs.round + g * costs.base + verification)


def expected(rounds: Sequence[Round], costs: CostModel) -> float:
    """Speedup over plain decoding, the prompt's pass left out, if every round cost what was measured for its kind."""
    tokens = sum(done.tokens for done in rounds)
    if not tokens:
        return 1.0
    counted = Counter((done.work, 1 + done.nodes) for done in rounds)
    return tokens * costs.plain / costs.seconds(counted, costs.prices(costs.base))


def _quantiles(seconds: Sequence[float]) -> Json:
    import numpy as np

    return {name: float(np.quantile(seconds, q)) if seconds else None for name, q in (("p50", 0.5), ("p95", 0.95))}
