"""How long the phases of a search take, by how fast the model runs here; and how much text there is time for."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from selfspec.measure.cost_fitting import forward_seconds
from selfspec.measure.cost_sweeps import EFFORTS, effort_within
from selfspec.runtime.forward import Runtime

from .budget import SHARES, Budget
from .continuations import FEWEST
from .controller_grid import LONGEST_DRAFT
from .objective import ALONE, RANKING_SHARE
from .warm_starts import BUDGETS

FINALISTS, CHOOSING = 4, 4  # sets that are chosen among, and prompts that they are measured on for that
WIDE, SLOW = 64, 0.1  # rows of the wide pass that is timed, and seconds of a step from which on a narrower one is
PLACES = 6  # of each text, whose streams are looked at
TRIALS = 12  # that there should be time for, even if that means less text
SCALES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05)  # of all tokens of the texts, as time allows
TEXTS = 3  # that are kept, if there are so many: with fewer, no set can be told to be worse than another
# Rows of a trial for each of the places where drafts start, as a share of the longest draft: where none is pruned, as
# long as drafts are. What is typical, also where they run in few bits, and times that at the least and at the most.
ROWS, IN_FEW_BITS, LEAST, MOST = 0.15, 0.45, 0.6, 1.7
CONFIDENT, CONFIDENCE_SHARE = 3, 0.25  # tokens of the drafts by which it is told what is sure, and of the places
OTHERS = 0.8, 1.15  # what the other phases may take, times what is expected
LATE = 0.1  # of the time asked for, by which a search may be late


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a pass over one row, and of every further row of a wide pass."""

    step: float
    row: float

    @classmethod
    def of(cls, runtime: Runtime, context: int) -> Pace:
        """Timed in about a second, or three passes, over `context` keys.

        Raises `BusyError` while the runtime has a stream.
        """
        limit = runtime.skeleton.context
        context = max(1, min(context, limit // 2))
        step = forward_seconds(runtime, context, repeats=2)
        rows, repeats = (WIDE, 4) if step < SLOW else (WIDE // 4, 1)
        step = forward_seconds(runtime, context, repeats=6) if step < SLOW else step
        rows = max(2, min(rows, limit - context))
        wide = forward_seconds(runtime, context, rows=rows, repeats=repeats)
        return cls(step, max(wide - step, 0.0) / (rows - 1))

    def rows(self, count: float) -> float:
        """Seconds of a pass over so many rows."""
        return self.step + max(count - 1, 0) * self.row


@dataclass(frozen=True, slots=True)
class SearchTask:
    """How much a search has to do.

    `prompts`: the tokens of each prompt searched on, `others` of each measured on; `new`: tokens that continue each.
    `variables`: of the space, 0 where they are not to be ranked. `trials`: still to be made. `replayed`: whether trials
    are replayed, else decoded. `measured`: whether the best is. `decided`: whether the texts are those that trials were
    scored on before; `priced`: whether costs are known. `in_few_bits`: whether what is likely tried runs in few
    bits, in drafts that are hardly ever wrong.
    """

    prompts: tuple[int, ...]
    others: tuple[int, ...]
    new: int
    variables: int
    trials: int
    replayed: bool = True
    measured: bool = True
    decided: bool = False
    priced: bool = False
    in_few_bits: bool = False

    def scaled(self, share: float) -> SearchTask:
        """With about this share of the tokens: fewer texts, and shorter ones."""
        count, new = len(self.prompts), self.new
        texts = max(min(TEXTS, count), round(count * math.sqrt(share)))
        return replace(self, prompts=self.prompts[:texts], new=max(min(FEWEST, new), int(count * new * share / texts)))

    def least(self) -> SearchTask:
        """One text, as short as can be, unless the texts are decided on."""
        return self if self.decided else replace(self, prompts=self.prompts[:1], new=min(FEWEST, self.new))

    def prompt(self, pace: Pace) -> float:
        """Seconds of a prompt's pass."""
        return pace.rows(statistics.mean(self.prompts))

    def trial(self, pace: Pace) -> float:
        """Seconds of a typical trial."""
        if not self.replayed:
            return len(self.prompts) * (self.prompt(pace) + self.new * pace.step)
        share = IN_FEW_BITS if self.in_few_bits else ROWS
        return LONGEST_DRAFT * (pace.step + share * len(self.prompts) * self.new * pace.row)

    def reading(self, pace: Pace) -> float:
        """Seconds of reading the texts, and what drafts are sure of, with each of the two that may tell it."""
        n = len(self.prompts)
        sure = 0.0 if self.decided else 2 * CONFIDENT * (pace.step + CONFIDENCE_SHARE * n * self.new * pace.row)
        return n * self.prompt(pace) + sure

    def needs(self, pace: Pace) -> dict[str, float]:
        """Seconds of each phase, done in full."""
        n, prompt, trial = len(self.prompts), self.prompt(pace), self.trial(pace)
        found = dict.fromkeys(SHARES, 0.0) | {"trials": self.trials * trial}
        if self.measured:
            run = pace.rows(statistics.mean(self.others)) + self.new * pace.step
            found |= {
                "choosing": (1 + FINALISTS) * (1 + CHOOSING) * run,
                "measuring": 2 * (1 + 1.5 * len(self.others)) * run,
            }
        if not self.replayed:
            return found | {"costs": (1 + 1 / n) * trial, "ranking": n * prompt}
        continued = n * prompt + self.new * (pace.step + pace.rows(n - 1))
        if self.measured:
            found["choosing"] = continued + (1 + FINALISTS) * trial
        together = 1 if self.decided else pace.rows(n - 1) / pace.step
        ranked = self.variables * ALONE * pace.rows(n * self.new * RANKING_SHARE) + BUDGETS * pace.rows(n * PLACES)
        return found | {
            "texts": n * prompt + self.new * (1 + together) * pace.step,
            "costs": 0.0 if self.priced else effort_within(math.inf, pace.step, prompt).seconds(pace.step, prompt),
            "ranking": self.reading(pace) + (ranked if self.variables else 0.0),
            "heads": 2 * trial if self.measured else 0.0,
            "ending": trial,
        }

    def fits(self, pace: Pace, budget: Budget) -> bool:
        """Whether there is time for these texts, and for several trials on them."""
        needs = {"texts": self.needs(pace)["texts"], "trials": min(TRIALS, self.trials) * self.trial(pace)}
        needs["ranking"] = self.reading(pace) if self.replayed else 0.0
        return all(seconds <= budget.part(phase) for phase, seconds in needs.items())


def time_for(task: SearchTask, pace: Pace, budget: Budget) -> SearchTask | None:
    """The task with as much text as there is time for; None where there is none to try anything.

    The budget is told what the phases need.
    """
    planned = task
    if budget.limited and not task.decided:
        scaled = (task.scaled(share) for share in SCALES)
        planned = next((fewer for fewer in scaled if fewer.fits(pace, budget)), task.least())
        least = planned.least()
        costs = EFFORTS[-1].seconds(pace.step, least.prompt(pace)) if task.replayed else 0.0
        if costs + least.needs(pace)["texts"] + 2 * least.trial(pace) > budget.left + LATE * budget.seconds:
            return None
    budget.expect(planned.needs(pace))
    return planned


def said(task: SearchTask, pace: Pace, budget: Budget) -> str:
    """About how long a task will take, done in full, and what that is told from."""
    needs = task.needs(pace)
    others, trials = budget.spent + sum(needs.values()) - needs["trials"], needs["trials"]
    low, high = OTHERS[0] * others + LEAST * trials, OTHERS[1] * others + MOST * trials
    span = f"about {_span(low, high)}, by a plain step of {pace.step * 1e3:.3g} ms and {pace.row * 1e3:.2g} ms a row"
    if not budget.limited:
        return f"this will take {span}; minutes bound it"
    if high <= budget.seconds:
        return f"this will take {span}"
    return f"this would take {span}; it is cut down to the {_span(budget.seconds, budget.seconds)} asked for"


def _span(low: float, high: float) -> str:
    """Seconds in words: from low to high."""
    unit, each, digits = ("s", 1.0, 0) if high < 100 else ("minutes", 60.0, 1)
    ends = [f"{seconds / each:.{digits}f}".removesuffix(".0") for seconds in (low, high)]
    return f"{' to '.join(dict.fromkeys(ends))} {unit}"
