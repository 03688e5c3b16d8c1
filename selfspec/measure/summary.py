"""The figures that a benchmark reports, and whether the texts of each method equal those of plain decoding.

Plain decoding is decoding without drafts. Texts are compared by token ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Literal, get_args

from selfspec.basics.checked_model import Json
from selfspec.measure.audit import Difference, copies_difference
from selfspec.types.costs import CostModel
from selfspec.types.draft_work import HEAD_STEP
from selfspec.types.stats import Round, acceptance_by_position

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.measure.timing import Runs
    from selfspec.text.prompt_template import Prompt


Verdict = Literal["same", "near_tie", "bug"]
_VERDICTS: tuple[Verdict, ...] = get_args(Verdict)  # from best to worst
Tokens = tuple[int, ...]


def verdict(plain: LLM, other: LLM, prompt: Prompt, texts: Collection[Tokens], others: Collection[Tokens]) -> Verdict:
    """Return the worst verdict on the greedy texts (new token ids) that two methods produced after `prompt`.

    `plain` and `other` are copies of the same model whose weight layouts may differ. `texts`: the texts of all runs of
    plain decoding, on `plain`; `others`: the texts of all runs of the other method, on `other`. Every text is compared
    with the smallest text in `texts`.
    """
    first = min(texts)
    ids = plain.encode(prompt)
    differences = [copies_difference(plain, other, ids, first, text) for text in sorted({*texts, *others} - {first})]
    return max((_judged(difference) for difference in differences), key=_VERDICTS.index, default="same")


def count_verdicts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Return the number of prompts with each verdict, as `same`, `near_ties` and `bugs`; one verdict per prompt."""
    count = Counter(verdicts)
    return {"same": count["same"], "near_ties": count["near_tie"], "bugs": count["bug"]}


def _judged(difference: Difference | None) -> Verdict:
    if difference is None:
        return "same"
    return "near_tie" if difference.near_tie else "bug"


def summary(runs: Runs, name: str, *, bases: Sequence[str]) -> Json:
    """Return the figures of method `name`: speed, speedups with intervals, latencies in seconds, acceptance.

    `bases`: the names of the methods over which speedups are reported, under the key `ratio`. The inter-token latency
    of tokens emitted together is the time since the previous emission, divided by their number. `draft_cost`: the
    drafting time per drafted token divided by the time of a plain decode step; None if one of the two is unknown.
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
    """Return the median seconds of a plain decode step; None if plain decoding was not measured.

    The first round of each text is left out, as it includes the prefill.
    """
    each = (run for prompt in runs.stats.get("plain", ()) for run in prompt)
    seconds = [done.seconds for run in each for done in run.log[1:]]
    return median(seconds) if seconds else None


def by_task(
    runs: Runs, name: str, tasks: Sequence[str], *, bases: Sequence[str], verdicts: Sequence[Verdict] | None
) -> Json:
    """Return the figures of method `name` for each task and, as `overall`, for all prompts.

    `tasks` and `verdicts` have one entry per prompt; `verdicts` is None if texts were not compared. The figures are
    defined as in Spec-Bench (`evaluation/speed.py`): `mean_accepted_tokens`, emitted tokens per target pass;
    `mean_tokens_per_second`, the mean over prompts of the tokens per second, prefill included; `speedup`, the ratio of
    this mean to that of each method in `bases`. With several rounds, the mean of each round's figure is reported.
    `ratio`: as in `summary`. `sources`: the share of all tokens by the source that proposed them, where known.
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

    The formula is E / (g * c + v(g + 1)) with E = (1 - a^(g + 1)) / (1 - a): Leviathan et al. 2211.17192, with v(w) in
    place of 1. g: the mean draft length. c and v(w): the times of a draft step and of a round that verifies w tokens,
    in plain decode steps. a: the acceptance rate of a token whose predecessors in the draft were all accepted.
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


def expected(rounds: Sequence[Round], costs: CostModel, *, head: float = 0.0) -> float:
    """Return the speedup over plain decoding, prefill excluded, that the cost model predicts for these rounds.

    `head`: the time of a step of a head below the path, in draft steps.
    """
    tokens = sum(done.tokens for done in rounds)
    if not tokens:
        return 1.0
    counted = Counter((done.work, 1 + done.nodes) for done in rounds)
    prices = {**costs.call_costs(costs.base), HEAD_STEP: head * costs.base}
    return tokens * costs.plain / costs.seconds(counted, prices)


def _quantiles(seconds: Sequence[float]) -> Json:
    import numpy as np

    return {name: float(np.quantile(seconds, q)) if seconds else None for name, q in (("p50", 0.5), ("p95", 0.95))}
