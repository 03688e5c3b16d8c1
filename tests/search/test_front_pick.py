"""What no other trial beats: in draft cost and acceptance, and in memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selfspec.search.front_pick import best_within, memory_of, pareto
from selfspec.search.ledger import Entry

from selfspec.basics.errors import SelfspecError
from selfspec.types.draft_path import DraftPath
from selfspec.types.skip import SkipSet

SIZES = {
    "model_type": "llama",
    "layers": 2,
    "hidden": 8,
    "heads": 4,
    "kv_heads": 2,
    "intermediate": 16,
    "vocabulary": 10,
}


def entry(cost, right, path=None, *, speed=1.0, pruned=False):
    score = SimpleNamespace(acceptance_rate=right, pruned=pruned, path=path or DraftPath(), tokens_per_second=speed)
    return Entry(score, cost, 0.0, "")  # type: ignore[arg-type]


shares = st.integers(0, 3).map(lambda x: x / 3)
trials = st.lists(st.tuples(shares, shares, shares), max_size=12)


@given(trials)
def test_none_beats_what_is_on_the_front_and_something_on_it_whatever_is_not(rows):
    entries = [entry(cost, right) for cost, right, _ in rows]
    held = {id(e): memory for e, (*_, memory) in zip(entries, rows, strict=True)}

    def seen(e):
        return e.draft_cost, -e.score.acceptance_rate, held[id(e)]

    def no_worse(a, b):
        return all(x <= y for x, y in zip(seen(a), seen(b), strict=True))

    front = pareto(entries, lambda e: held[id(e)])
    assert [e.draft_cost for e in front] == sorted(e.draft_cost for e in front)
    assert not any(no_worse(a, b) for a in front for b in front if a is not b)
    assert all(any(no_worse(a, e) for a in front) for e in entries)


def test_without_memory_acceptance_rises_with_cost():
    entries = [entry(0.5, 0.7), entry(0.4, 0.6), entry(0.6, 0.65), entry(0.3, 0.9, pruned=True), entry(None, 1.0)]
    assert pareto(entries) == [entries[1], entries[0]]


def test_the_fastest_within_a_cost_and_memory():
    every = tuple(range(2))
    low = DraftPath(int8=SkipSet(every, every))
    entries = [entry(0.4, 0.9, low, speed=3), entry(0.7, 0.8, speed=2), entry(0.9, 0.8, speed=1)]
    ledger = SimpleNamespace(
        entries=entries,
        description="here",
        settings={"model": {"model_type": "llama", **SIZES}, "dtype": "torch.float32"},
    )
    held = memory_of(ledger)
    assert held(entries[0]) == pytest.approx(0.25 * 1152 / 1232)
    assert held(entries[1]) == 0
    assert best_within(ledger) is best_within(ledger, 0.5, 0.3) is entries[0]
    assert best_within(ledger, max_memory=0.1) is best_within(ledger, 0.8, 0) is entries[1]
    with pytest.raises(SelfspecError, match="here: no trial's draft step costs 0.5 of a plain one or less"):
        best_within(ledger, 0.5, 0)
    ledger.entries = entries[:1]
    with pytest.raises(SelfspecError, match="extra memory is 0.1 of the model's bytes or less; the smallest is 0.23"):
        best_within(ledger, max_memory=0.1)
