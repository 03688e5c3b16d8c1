"""A study's data frames, number by number, from a small study made by hand.

What no other trial beats: in draft cost and acceptance, and in memory.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selfspec.search.ledger import Entry, Ledger
from selfspec.search.objective import ALONE
from selfspec.search.space import Space
from selfspec.search.trial_tables import best_within, memory_of, pareto, sensitivity_frame, trials_frame
from studies import COSTS, SETTINGS, small_study

from selfspec.basics.errors import SelfspecError
from selfspec.types.draft_path import DraftPath, SkipSet


def test_trials():
    frame = trials_frame(small_study())
    assert frame.to_dict("list") == {
        "trial": [1, 2, 3, 4],
        "seconds": [2.0, 4.0, 6.0, 8.0],
        "speedup": [0.9, 1.2, 1.1, 1.5],
        "best": [0.9, 1.2, 1.2, 1.2],  # the last was pruned
        "tokens_per_second": pytest.approx([0.09, 0.12, 0.11, 0.15]),
        "acceptance_rate": [0.9, 0.8, 0.6, 0.5],
        "tokens_per_round": [1.9, 1.8, 1.6, 1.5],
        "draft_cost": [0.9, 0.8, 0.6, 0.7],
        "skipped": [1, 2, 2, 2],
        "int8": [0] * 4,
        "int4": [0] * 4,
        "attention": [1, 2, 1, 1],
        "mlp": [0, 0, 1, 1],
        "pruned": [False, False, False, True],
        "controller": ["fixed"] * 4,
        "candidates": [3] * 4,
        "on_front": [True, True, True, False],
    }


def test_timed_trials_have_no_draft_cost():
    ledger = small_study()
    ledger.keep_score(ledger.entries[0].score, Space(2), seconds=1)
    last = trials_frame(ledger).iloc[-1]
    assert math.isnan(last["draft_cost"])
    assert not last["on_front"]
    assert last["seconds"] == 9


def test_no_trials_yet():
    with pytest.raises(SelfspecError, match=r"^memory: holds no trials yet$"):
        trials_frame(Ledger(settings=SETTINGS))


def test_sensitivity():
    """Two tokens drafted with nothing skipped: three tokens come in 2 * 10 + 12.5 s, where plain decoding takes 30."""
    assert (COSTS.plain, COSTS.draft(SkipSet(), 2), COSTS.verification(3), ALONE) == (10, 10, 12.5, 2)
    frame = sensitivity_frame(small_study())
    assert list(zip(frame["layer"], frame["part"], strict=True)) == [
        (0, "attention"),
        (0, "mlp"),
        (1, "attention"),
        (1, "mlp"),
    ]
    assert frame["speedup"].tolist()[:3] == [1.0, 0.5, 1 / 1.1]
    assert frame["gain"].tolist()[:3] == pytest.approx([gain * 32.5 / 30 - 1 for gain in (1.0, 0.5, 1 / 1.1)])
    assert frame.iloc[3][["speedup", "gain"]].isna().all(), "there was no time for it"
    assert frame["draft_tokens"].tolist() == [2] * 4


def test_sensitivity_by_layers_and_with_a_controller_that_drafts_less():
    settings = {"granularity": "layer", "controller": {"name": "fixed", "options": {"k": 1}}}
    ledger = Ledger(settings={**SETTINGS, **settings})
    ledger.keep_costs(COSTS)
    ledger.keep_gains(((0.0, 1.0), (0.0, 2.0)))
    frame = sensitivity_frame(ledger)
    assert frame["part"].tolist() == ["layer", "layer"]
    nothing = 2 * 10 / (10 + COSTS.verification(2))
    assert frame["gain"].tolist() == pytest.approx([1 / nothing - 1, 2 / nothing - 1])


def test_a_study_without_sensitivities_says_so():
    with pytest.raises(
        SelfspecError,
        match="holds no gains of single sub-layers; expected a search with --objective replay, warm starts, and time",
    ):
        sensitivity_frame(Ledger(settings=SETTINGS))
    for change, said in (({"keep": [0]}, "4 gains for 2 parts"), ({"model": {}}, "KeyError")):
        with pytest.raises(SelfspecError, match=said):
            sensitivity_frame(small_study(**change))


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
    ledger.settings["held"] = "bfloat16"  # weights stored in half the bytes
    assert memory_of(ledger)(entries[0]) == pytest.approx(0.5 * 1152 / 1232)
    del ledger.settings["held"]
    assert best_within(ledger) is best_within(ledger, 0.5, 0.3) is entries[0]
    assert best_within(ledger, max_memory=0.1) is best_within(ledger, 0.8, 0) is entries[1]
    with pytest.raises(SelfspecError, match="here: no trial's draft step costs 0.5 of a plain one or less"):
        best_within(ledger, 0.5, 0)
    ledger.entries = entries[:1]
    with pytest.raises(SelfspecError, match="extra memory is 0.1 of the model's bytes or less; the smallest is 0.23"):
        best_within(ledger, max_memory=0.1)
