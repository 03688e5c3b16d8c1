"""A study's data frames, number by number, from a small study made by hand."""

from __future__ import annotations

import math

import pytest
from selfspec.search.ledger import Ledger
from selfspec.search.objective import ALONE
from selfspec.search.space import Space
from selfspec.search.trial_tables import sensitivity_frame, trials_frame
from studies import COSTS, SETTINGS, small_study

from selfspec.basics.errors import SelfspecError
from selfspec.types.skip import SkipSet


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
        SelfspecError, match="holds no gains of single sub-layers; expected a search with --objective replay"
    ):
        sensitivity_frame(Ledger(settings=SETTINGS))
    for change, said in (({"keep": [0]}, "4 gains for 2 parts"), ({"model": {}}, "KeyError")):
        with pytest.raises(SelfspecError, match=said):
            sensitivity_frame(small_study(**change))
