"""Samples with and without speculation, and whether they could have come from the same distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from models import run
from scipy import stats
from torch import Tensor

from selfspec.runtime.base import Runtime
from selfspec.speculation import rules as verify
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.drafts import Draft
from selfspec.speculation.rules import Rule
from selfspec.speculation.sampling import Sampler

RARE = 10  # outcomes seen less often are counted as one


def draw(
    runtime: Runtime,
    drafter: Drafter,
    prompt: list[int],
    length: int,
    seeds: range,
    *,
    rule: str | Rule | None = None,
    on_sample: Callable[[int], None] = lambda done: None,
    **sampling: Any,
) -> list[tuple[int, ...]]:
    """One text of `length` tokens for each seed, by one stream of randomness each."""
    samples = []
    for done, seed in enumerate(seeds, 1):
        sampler = Sampler(seed=seed, tied=False, **sampling)
        samples.append(tuple(run(runtime, drafter, prompt, length, sampler=sampler, rule=rule)[0]))
        on_sample(done)
    return samples


def no_residual(draft: Draft, scores: Tensor, sampler: Sampler, position: int) -> verify.Verdict:
    """A planted bug: after a rejection the next token is drawn from p, not from what is left of it."""
    path, following, p = verify.token(draft, scores, sampler, position)
    row = path[-1] + 1 if path else 0
    if draft.children[row]:
        following = sampler.draw(sampler.probs(scores)[row], position + len(path))
    return verify.Verdict(path, following, p)


def p_values(a: Sequence[tuple[int, ...]], b: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """Two-sample chi-square tests: of the token at each place, and of each two tokens that follow each other."""
    length = len(a[0])
    views: dict[str, Callable[[tuple[int, ...]], Any]] = {
        **{f"token {i + 1}": lambda text, i=i: text[i] for i in range(length)},  # type: ignore[misc]
        **{f"tokens {i + 1}, {i + 2}": lambda text, i=i: text[i : i + 2] for i in range(length - 1)},  # type: ignore[misc]
    }
    return {name: _chi_square(Counter(map(view, a)), Counter(map(view, b))) for name, view in views.items()}


def smallest(p: dict[str, float]) -> float:
    """The smallest p-value times how many there are (Bonferroni), at most 1."""
    return min(1.0, min(p.values()) * len(p))


def _chi_square(a: Counter[Any], b: Counter[Any]) -> float:
    often = [key for key in a | b if a[key] + b[key] >= RARE]
    table = np.array([[counts[key] for key in often] for counts in (a, b)], dtype=float)
    rest = [counts.total() - table[i].sum() for i, counts in enumerate((a, b))]
    if sum(rest):
        table = np.column_stack((table, rest))
    return float(stats.chi2_contingency(table).pvalue) if table.shape[1] > 1 else 1.0
