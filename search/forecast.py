"""Forecast the time of a search's phases from the model's speed on this machine, and the amount of text that fits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from selfspec.measure.cost_sweeps import EFFORTS, effort_within
from selfspec.measure.pace import Pace

from .budget import SHARES, Budget
from .continuations import FEWEST
from .objective import ALONE, RANKING_SHARE
from .trace import LONGEST_DRAFT
from .warm_starts import BUDGETS

FINALISTS, CHOOSING = 4, 4  # number of best paths to choose among, and of prompts to measure the paths on
CONTENDING = 8  # number of prompts on which the path chosen by replays is decoded beside those of one quantised mode
STREAM_POSITIONS = 6  # positions of each text whose residual streams are read
TRIALS = 12  # trials that should fit the time, even if that means less text
SCALES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05)  # shares of the texts' tokens, as time allows
TEXTS = 3  # the fewest texts, if there are as many prompts: with fewer texts, no path can be pruned
# Draft steps from each draft position in a trial that is not pruned, as a share of the longest draft: typically, and
# with a quantised base mode; then the factors from the typical time of a trial to the shortest and the longest time.
ROWS, QUANTIZED_ROWS, LEAST, MOST = 0.15, 0.45, 0.6, 1.7
CONFIDENT, CONFIDENCE_SHARE = 3, 0.25  # draft length, and share of the draft positions, for fitting the confidence
GPTQ = 1000, 7  # time of GPTQ: plain steps for the weights, and rows of a pass for each token of the texts
OTHERS = 0.8, 1.15  # factors from the expected time of all phases but the trials to the shortest and longest time
LATE = 0.1  # share of the time limit by which a search may be late


@dataclass(frozen=True, slots=True)
class SearchTask:
    """The amount of work that a search has to do.

    `prompts`: the lengths in tokens of the prompts to search on; `eval_prompts`: of the prompts to measure on.
    `max_new_tokens`: the number of new tokens for each prompt. `variables`: the number of single changes to rank; 0
    without ranking. `trials`: the number of trials still to be made. `replayed`: whether trials are replayed (else
    decoded). `measured`: whether the best path is measured. `texts_fixed`: whether the study has fixed its texts;
    `costs_known`: whether it has a cost model. `quantized_base`: whether promising paths run quantised, so that drafts
    are hardly ever wrong. `further_paths`: the number of further paths that the cost model is fitted to because of
    quantised modes. `quantizes`: whether weights are quantised to int4 by GPTQ on the texts. `rescored`: whether the
    finalists are replayed on other texts (else decoded). `uniform`: the number of paths in one quantised mode.
    """

    prompts: tuple[int, ...]
    eval_prompts: tuple[int, ...]
    max_new_tokens: int
    variables: int
    trials: int
    replayed: bool = True
    measured: bool = True
    texts_fixed: bool = False
    costs_known: bool = False
    quantized_base: bool = False
    further_paths: int = 0
    quantizes: bool = False
    rescored: bool = True
    uniform: int = 0

    def scaled(self, share: float) -> SearchTask:
        """Return the task with about `share` of the new tokens: fewer and shorter texts."""
        count, new = len(self.prompts), self.max_new_tokens
        texts = max(min(TEXTS, count), round(count * math.sqrt(share)))
        return replace(
            self, prompts=self.prompts[:texts], max_new_tokens=max(min(FEWEST, new), int(count * new * share / texts))
        )

    def least(self) -> SearchTask:
        """Return the task with a single text of the least length, unless the study has fixed its texts."""
        return (
            self
            if self.texts_fixed
            else replace(self, prompts=self.prompts[:1], max_new_tokens=min(FEWEST, self.max_new_tokens))
        )

    def prompt(self, pace: Pace) -> float:
        """Return the mean seconds of the prefill of a prompt."""
        return statistics.mean(map(pace.prefill, self.prompts))

    @property
    def context(self) -> float:
        """The mean number of keys in the KV cache while a text is decoded or replayed."""
        return statistics.mean(self.prompts) + self.max_new_tokens / 2

    def trial(self, pace: Pace) -> float:
        """Return the seconds of a typical trial."""
        if not self.replayed:
            return sum(pace.decode(length, self.max_new_tokens) for length in self.prompts)
        share = QUANTIZED_ROWS if self.quantized_base else ROWS
        return LONGEST_DRAFT * pace.replay(self.context).rows(share * len(self.prompts) * self.max_new_tokens)

    def reading(self, pace: Pace) -> float:
        """Return the seconds of prefilling the texts and of the two replays to which the confidence is fitted."""
        n, rows = len(self.prompts), CONFIDENCE_SHARE * len(self.prompts) * self.max_new_tokens
        sure = 0.0 if self.texts_fixed else 2 * CONFIDENT * pace.replay(self.context).rows(rows)
        return n * self.prompt(pace) + sure

    def needs(self, pace: Pace) -> dict[str, float]:
        """Return the expected seconds of each phase, by its name in `SHARES`, if no phase is cut short."""
        n, prompt, trial, local = len(self.prompts), self.prompt(pace), self.trial(pace), pace.at(self.context)
        seconds = dict.fromkeys(SHARES, 0.0) | {"trials": self.trials * trial}
        if self.measured:
            run = statistics.mean(pace.decode(length, self.max_new_tokens) for length in self.eval_prompts)
            seconds |= {
                "choosing": (1 + FINALISTS) * (1 + min(CHOOSING, len(self.eval_prompts))) * run,
                "measuring": 2 * (1 + 1.5 * len(self.eval_prompts)) * run,
            }
        if not self.replayed:
            return seconds | {"costs": (1 + 1 / n) * trial, "ranking": n * prompt}
        together = local.rows(n)  # a step of all texts in one pass
        if self.measured and self.rescored:
            seconds["choosing"] = n * prompt + self.max_new_tokens * (local.step + together) + (1 + FINALISTS) * trial
            seconds["choosing"] += (1 + self.uniform) * (1 + CONTENDING) * run if self.uniform else 0.0
        replaying = pace.replay(self.context)
        ranked = self.variables * ALONE * replaying.rows(n * self.max_new_tokens * RANKING_SHARE)
        ranked += BUDGETS * replaying.rows(n * STREAM_POSITIONS)
        return seconds | {
            "texts": n * prompt + self.max_new_tokens * (local.step + (local.step if self.texts_fixed else together)),
            "costs": 0.0 if self.costs_known else self.costs(pace),
            "ranking": self.reading(pace) + self.quantizing(pace) + (ranked if self.variables else 0.0),
            "heads": 2 * trial if self.measured else 0.0,
            "ending": trial,
        }

    def quantizing(self, pace: Pace) -> float:
        """Return the seconds of quantising weights to int4 by GPTQ."""
        steps, rows = GPTQ
        tokens = sum(self.prompts) + len(self.prompts) * self.max_new_tokens
        return steps * pace.step + rows * tokens * pace.row if self.quantizes else 0.0

    def costs(self, pace: Pace) -> float:
        """Return the seconds of measuring the cost model, if its time is not limited."""
        step, prompt = pace.at(self.context).step, self.prompt(pace)
        return effort_within(math.inf, step, prompt, further=self.further_paths).seconds(step, prompt)

    def fits(self, pace: Pace, budget: Budget) -> bool:
        """Return whether the time allows the texts of this task and several trials on these texts."""
        needs = {"texts": self.needs(pace)["texts"], "trials": min(TRIALS, self.trials) * self.trial(pace)}
        needs["ranking"] = self.reading(pace) if self.replayed else 0.0
        return all(seconds <= budget.part(phase) for phase, seconds in needs.items())


def fit_to_budget(task: SearchTask, pace: Pace, budget: Budget) -> SearchTask | None:
    """Return the task with as much text as fits the time; None where no trial fits.

    If the task fits, the seconds that each phase needs are recorded in `budget`.
    """
    planned = task
    if budget.limited and not task.texts_fixed:
        scaled = (task.scaled(share) for share in SCALES)
        planned = next((fewer for fewer in scaled if fewer.fits(pace, budget)), task.least())
        least = planned.least()
        step = pace.at(least.context).step
        costs = EFFORTS[-1].seconds(step, least.prompt(pace)) if task.replayed else 0.0
        if costs + least.needs(pace)["texts"] + 2 * least.trial(pace) > budget.left + LATE * budget.seconds:
            return None
    budget.expect(planned.needs(pace))
    return planned


def forecast_summary(task: SearchTask, pace: Pace, budget: Budget) -> str:
    """Return a line of text with the expected duration of `task`, and the speeds that the forecast is based on."""
    needs = task.needs(pace)
    others, trials = budget.spent + sum(needs.values()) - needs["trials"], needs["trials"]
    low, high = OTHERS[0] * others + LEAST * trials, OTHERS[1] * others + MOST * trials
    local = pace.at(task.context)
    span = f"about {_span(low, high)}, by a plain step of {local.step * 1e3:.3g} ms and {local.row * 1e3:.2g} ms a row"
    if not budget.limited:
        return f"this will take {span}; `minutes` limits it"
    if high <= budget.seconds:
        return f"this will take {span}"
    return f"this would take {span}; it is shortened to the limit of {_span(budget.seconds, budget.seconds)}"


def _span(low: float, high: float) -> str:
    """Return a range of seconds as text, in seconds or minutes."""
    unit, each, digits = ("s", 1.0, 0) if high < 100 else ("minutes", 60.0, 1)
    ends = [f"{seconds / each:.{digits}f}".removesuffix(".0") for seconds in (low, high)]
    return f"{' to '.join(dict.fromkeys(ends))} {unit}"


def oracle_seconds(lengths: Sequence[int], max_new_tokens: int, pace: Pace) -> float:
    """Return the seconds that `oracle` is expected to take on prompts of these lengths in tokens."""
    task = SearchTask(tuple(lengths), (), max_new_tokens, variables=0, trials=1, measured=False, quantized_base=True)
    reading = replace(task, texts_fixed=True).reading(pace)
    return task.needs(pace)["texts"] + reading + task.trial(pace)
