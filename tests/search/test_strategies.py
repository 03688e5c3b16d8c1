"""The conformance suite of strategies."""

from __future__ import annotations

import pytest
from selfspec.search.strategies import STRATEGIES, make_strategy

from selfspec.errors import SelfspecError
from selfspec.skip import SkipSet

LAYERS = 4
BEST = SkipSet((1, 2), (0, 3))


def score(skip):
    """How many bits agree with the best set."""
    return sum(a == b for a, b in zip(skip.bits(LAYERS), BEST.bits(LAYERS), strict=True))


def trials(strategy, n):
    asked = []
    for _ in range(n):
        asked.append(strategy.ask())
        strategy.tell(asked[-1], score(asked[-1]))
    return asked


@pytest.fixture(params=STRATEGIES)
def name(request):
    return request.param


def test_a_seed_repeats(name):
    first, again, other = (trials(make_strategy(name, LAYERS, seed=s), 14) for s in (0, 0, 1))
    assert first == again != other


def test_it_learns(name):
    """Later proposals are better than the first ones, and the best is nearly found."""
    asked = trials(make_strategy(name, LAYERS, seed=0), 40)
    assert sum(map(score, asked[-10:])) > sum(map(score, asked[:10]))
    assert max(map(score, asked)) >= 7


def test_warm_starts_come_first(name):
    warm = (SkipSet(), BEST)
    assert trials(make_strategy(name, LAYERS, seed=0, warm=warm), 3)[:2] == list(warm)


def test_equal_scores_do_no_harm(name):
    strategy = make_strategy(name, LAYERS, seed=0)
    for _ in range(14):
        strategy.tell(strategy.ask(), 1.0)


def test_unknown_names_are_refused():
    with pytest.raises(SelfspecError, match="strategy 'oracle' is not known; known: tpe, skopt"):
        make_strategy("oracle", LAYERS, seed=0)
