"""A benchmark's figures, computed from its runs: ratios, latencies, acceptance, and theoretical speedups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean, median
from typing import TYPE_CHECKING

from selfspec.basics.checked_model import Json
from selfspec.measure.agreement import Verdict, count_verdicts
from selfspec.types.costs import CostModel
from selfspec.types.stats import Round, acceptance_by_position

if TYPE_CHECKING:
    from selfspec.measure.timing import Runs


def summary(runs: Runs, name: str, *, bases: Sequence[str]) -> Json:
    """Return a method's figures: speed, ratios to `bases` with intervals, latencies in seconds, acceptance.

    Tokens emitted together share the time since the previous emission: that is their inter-token latency. `draft_cost`:
    drafting time per drafted token divided by the time of a plain decode step, if both were measured.
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
    """Return the median seconds of a plain decode step, without the first round of each text."""
    each = (run for prompt in runs.stats.get("plain", ()) for run in prompt)
    seconds = [done.seconds for run in each for done in run.log[1:]]
    return median(seconds) if seconds else None


def by_task(
    runs: Runs, name: str, tasks: Sequence[str], *, bases: Sequence[str], verdicts: Sequence[Verdict] | None
) -> Json:
    """Return a method's figures for each task and for all prompts; `tasks` and `verdicts` have one entry per prompt.

    The figures are Spec-Bench's, as in its `evaluation/speed.py`: `mean_accepted_tokens`, emitted tokens per pass over
    all passes; `mean_tokens_per_second`, the mean over prompts of each one's tokens per second, prefill included; and
    `speedup`, that mean over a base's. With several rounds, they are the mean of the rounds' figures. `ratio` is as in
    `summary`; `sources`: the share of the tokens that each source proposed, as far as known.
    """
    result: Json = {"tasks": []}
    for task in dict.fromkeys(tasks):
        mine = [index for index, prompt_task in enumerate(tasks) if prompt_task == task]
        task_verdicts = None if verdicts is None else [verdicts[index] for index in mine]
        result["tasks"].append({"task": task, **_on_prompts(runs.for_prompts(mine), name, bases, task_verdicts)})
    return {**result, "overall": _on_prompts(runs, name, bases, verdicts)}


def _on_prompts(runs: Runs, name: str, bases: Sequence[str], verdicts: Sequence[Verdict] | None) -> Json:
    mine, total = runs.mean_speeds(name), runs.total(name)
    return {
        "prompts": len(runs.stats[name]),
        "mean_accepted_tokens": total.tokens_per_round,
        "sources": total.shares,
        "mean_tokens_per_second": mean(mine),
        "speedup": {base: mean(a / b for a, b in zip(mine, runs.mean_speeds(base), strict=True)) for base in bases},
        "ratio": _ratios(runs, name, bases),
        "same_text": None if verdicts is None else count_verdicts(verdicts),
    }


def _ratios(runs: Runs, name: str, bases: Sequence[str]) -> Json:
    ratios = {}
    for base in bases:
        ratio, (low, high) = runs.speedup(name, base)
        ratios[base] = {"median": ratio, "low": low, "high": high}
    return ratios


def theory(rounds: Sequence[Round], costs: CostModel) -> float:
    """Return the speedup over plain decoding if acceptance were i.i.d. and every draft had the mean length.

    E / (g * c + v(g + 1)) with E = (1 - a^(g + 1)) / (1 - a) (Leviathan et al. 2211.17192, with v(w) in place of 1).
    The acceptance rate a is conditional: of a token whose predecessors were all accepted.
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
    """Return the speedup over plain decoding, prefill excluded, if every round took the measured cost of its kind."""
    tokens = sum(done.tokens for done in rounds)
    if not tokens:
        return 1.0
    counted = Counter((done.work, 1 + done.nodes) for done in rounds)
    return tokens * costs.plain / costs.seconds(counted, costs.call_costs(costs.base))


def _quantiles(seconds: Sequence[float]) -> Json:
    import numpy as np

    return {name: float(np.quantile(seconds, q)) if seconds else None for name, q in (("p50", 0.5), ("p95", 0.95))}
