"""The simulator of batches: what it predicts for hand-written drafts and costs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from selfspec.types.acceptance import AcceptanceCurve
from selfspec.types.costs import PassCosts

FILE = Path(__file__).parent / "scripts" / "batch_simulator.py"
NEW, DEPTH = 12, 4
CURVE = AcceptanceCurve(accepted=[0.0, 1.0], following=[0.5, 1.0]).model_dump()


@pytest.fixture(scope="module")
def simulator():
    spec = importlib.util.spec_from_file_location("batch_simulator", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


def recorded(right):
    """A text of 12 tokens after a prompt of 3, of each draft of which `right` tokens are right, and known to be."""
    longest = [min(DEPTH, NEW - start - 1) for start in range(NEW)]
    confidences = [[1.0 if d < right else 0.1 for d in range(n)] for n in longest]
    return {"prompt": 3, "runs": [min(right, n) for n in longest], "confidences": confidences}


def trace(*texts, verify=lambda n: 1.0, draft=lambda n: 0.1):
    costs = {"verify": [0.0, *map(verify, range(1, 65))], "draft": [0.0, *map(draft, range(1, 65))]}
    controller = {"name": "rate", "options": {"floor": 0.0}}
    return {"controller": controller, "curve": CURVE, "first": 0.7, "texts": list(texts), "costs": costs}


def test_rounds_take_what_they_cost_and_tokens_come_when_they_end(simulator):
    """A prompt of three tokens and eleven rounds; with drafts of 4, rounds of 5, 5 and 1 tokens, the last undrafted."""
    found = simulator.compared(trace(recorded(4)), [simulator.Text(**recorded(4))], [2.0], 1, prefill=0.5)
    plain, fixed, oracle = found["plain"], found["fixed 4"], found["oracle"]
    assert (plain.tokens, plain.seconds, plain.first) == (NEW, pytest.approx(2 + 1.5 + 11), [pytest.approx(1.5)])
    assert plain.between == pytest.approx([1.0] * 11)
    assert (fixed.tokens, fixed.drafted, fixed.seconds) == (NEW, 8, pytest.approx(2 + 1.5 + 1.4 + 1.4 + 1))
    assert fixed.between == pytest.approx([0.28] * 10 + [1.0])
    assert oracle.seconds == pytest.approx(fixed.seconds)


def test_nothing_is_lost_to_drafts_that_are_never_right(simulator):
    """The oracle drafts nothing; a fixed length loses four passes a round while it may draft as many."""
    texts = [simulator.Text(**recorded(0))] * 4
    found = simulator.compared(trace(recorded(0)), texts, [0.0] * 4, 2, prefill=0.0)
    assert found["oracle"].drafted == 0
    assert found["oracle"].seconds == pytest.approx(found["plain"].seconds)
    assert found["plain"].seconds < found["allocated"].seconds < found["fixed 4"].seconds


def test_every_policy_emits_all_tokens_and_the_oracle_is_fastest(simulator):
    steps = {"verify": lambda n: 1 + 0.08 * max(n - 6, 0), "draft": lambda n: 0.15 + 0.01 * n}
    texts = [recorded(right) for right in (0, 2, 4)]
    every = [simulator.Text(**texts[i % 3]) for i in range(30)]
    found = simulator.compared(trace(*texts, **steps), every, [0.5 * i for i in range(30)], 4, prefill=0.01)
    assert {played.tokens for played in found.values()} == {30 * NEW}
    assert all(len(played.first) == 30 and len(played.between) == 30 * (NEW - 1) for played in found.values())
    assert all(found["oracle"].seconds <= played.seconds for played in found.values())
    assert found["allocated"].seconds < found["plain"].seconds
    rows = list(simulator.lines("x", found))
    assert len(rows) == len(found)
    assert rows[0].startswith("| x | plain | ")
    assert "| 0.0% |" in rows[-1]


def test_the_table_of_costs_is_that_of_the_batch(simulator):
    costs = simulator.policies(trace(recorded(1)))["plain"]().costs
    assert costs == PassCosts((0.0, *[1.0] * 64), (0.0, *[0.1] * 64))
