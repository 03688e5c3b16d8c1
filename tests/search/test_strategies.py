"""The conformance suite of strategies."""

from __future__ import annotations

import pytest
from selfspec.search.space import Space
from selfspec.search.strategies import STRATEGIES, Problem, make_strategy

from selfspec.basics.errors import SelfspecError
from selfspec.types.draft_path import MODES, DraftPath, SkipSet

SPACE = Space(4)
skipping = DraftPath.skipping
BEST = skipping((1, 2), (0, 3))
MIXED = Space(4, modes=MODES, head=("full", "int8"))
BEST_MIXED = DraftPath(SkipSet((1,), ()), None, SkipSet((0, 2, 3), (1, 2)), SkipSet((), (0, 3)), "int8")


def score(path):
    """How many modes agree with the best path."""
    return sum(a == b for a, b in zip(path.modes(4), BEST.modes(4), strict=True))


def score_mixed(path):
    agree = sum(a == b for a, b in zip(path.modes(4), BEST_MIXED.modes(4), strict=True))
    return agree + (path.head == "int8")


def trials(strategy, n, score=score):
    asked = []
    for _ in range(n):
        asked.append(strategy.ask())
        strategy.tell(asked[-1], score(asked[-1]))
    return asked


@pytest.fixture(params=STRATEGIES)
def name(request):
    return request.param


def skipped(path):
    return len(path.skip)


def few(name, n):
    """So many trials, fewer for a strategy whose every one takes half a second from the eleventh on."""
    return min(n, 13) if name == "skopt" else n


def test_a_seed_repeats(name):
    first, again, other = (trials(make_strategy(name, Problem(SPACE, s)), few(name, 25)) for s in (0, 0, 1))
    assert first == again != other


def test_it_finds_good_sets(name):
    """The best is nearly found, and what learns proposes better sets later."""
    asked = trials(make_strategy(name, Problem(SPACE, 0)), 24 if name in ("skopt", "climb", "dp") else 40)
    assert max(map(score, asked)) >= 7
    if name not in ("random", "greedy"):
        assert sum(map(score, asked[-10:])) >= sum(map(score, asked[:10]))


@pytest.mark.parametrize(
    "name", sorted({*STRATEGIES} - {"greedy", "dp"}), indirect=True
)  # which have starts of their own
def test_warm_starts_come_first(name):
    warm = (skipping((3,)), BEST)
    assert trials(make_strategy(name, Problem(SPACE, 0, warm)), 3)[:2] == list(warm)


def test_what_others_found_is_learnt(name):
    """Before, between and after its own asking."""
    strategy = make_strategy(name, Problem(SPACE, 0))
    asked = strategy.ask()
    for bits in (2, 11, 29, 74, 201):
        other = SPACE.path([bits >> i & 1 for i in range(8)])
        strategy.learn(other, score(other))
    strategy.tell(asked, score(asked))
    near = skipping((1, 2), (0,))
    strategy.learn(near, score(near))
    later = trials(strategy, 8)
    if name in ("climb", "dp"):
        assert BEST in later, "one change from a set that another found"


def test_equal_scores_do_no_harm(name):
    trials(make_strategy(name, Problem(SPACE, 0)), few(name, 30), score=lambda skip: 1.0)


def test_sets_that_are_too_dear_do_no_harm(name):
    trials(
        make_strategy(name, Problem(SPACE, 0)),
        few(name, 20),
        score=lambda path: score(path) if len(path.skip) > 3 else -0.3,
    )


def test_layers_that_are_kept_are_never_skipped(name):
    space = Space(5, keep=(0, 4), granularity="layer")
    warm = tuple(space.nearest(skip) for skip in (SkipSet((0, 1), (0, 1)), SkipSet((2, 3), (2,))))
    for skip in (path.skip for path in trials(make_strategy(name, Problem(space, 0, warm)), 12, score=skipped)):
        assert skip.attention == skip.mlp
        assert not {0, 4} & {*skip.attention}


def test_a_space_of_one_variable_is_enough(name):
    space = Space(3, keep=(0, 2), granularity="layer")
    assert skipping((1,), (1,)) in trials(make_strategy(name, Problem(space, 0)), 12, score=skipped)


def test_modes_are_found_too(name):
    """Of four modes and a head, what learns finds better paths than it began with."""
    asked = trials(make_strategy(name, Problem(MIXED, 0, (MIXED.path(MIXED.start),))), few(name, 60), score=score_mixed)
    assert all(MIXED.nearest(path) == path for path in asked)
    assert max(map(score_mixed, asked)) >= (9 if name in ("climb", "dp", "greedy") else 5)


def test_what_is_cheap_already_is_where_greedy_begins():
    asked = trials(make_strategy("greedy", Problem(MIXED, 0)), 40, score=score_mixed)
    assert asked[0] == MIXED.path(MIXED.start)
    assert BEST_MIXED in asked


def test_climbing_tries_the_most_promising_change_first():
    gains = tuple((0.0, gain) for gain in (0.1, 0.5, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0))
    strategy = make_strategy("climb", Problem(SPACE, 0, (skipping(),), gains))
    asked = trials(strategy, 3, score=lambda path: 0.0 if len(path.skip) else 1.0)
    assert asked == [skipping(), skipping((), (0,)), skipping((1,))]  # variables: attention 0, MLP 0, attention 1, ...


def test_climbing_never_repeats_itself():
    asked = trials(make_strategy("climb", Problem(SPACE, 3)), 60)
    assert len(set(asked)) == len(asked)


def test_greedy_eliminates_to_the_end():
    """Each step keeps what hurts least; after the last sub-layer it climbs from the best seen."""
    worth = {0: 3.0, 1: -1.0, 2: 2.0, 3: 1.0, 4: -2.0, 5: 0.5, 6: -4.0, 7: -3.0}
    gains = tuple((0.0, worth[i]) for i in range(8))
    strategy = make_strategy("greedy", Problem(SPACE, 0, gains=gains))
    asked = trials(strategy, 12, score=lambda skip: sum(worth[i] for i, bit in enumerate(SPACE.point(skip)) if bit))
    order = [0, 2, 3, 5, 1, 4, 7, 6]
    expected = [SPACE.path([i in order[:k] for i in range(8)]) for k in range(9)]
    assert asked[:9] == expected
    assert sum(a != b for a, b in zip(SPACE.point(asked[9]), SPACE.point(expected[4]), strict=True)) == 1


def test_the_programme_comes_first_in_dp():
    planned = (skipping((1,), (2,)), skipping((0, 1, 2), ()))
    asked = trials(make_strategy("dp", Problem(SPACE, 0, programme=planned)), 5)
    assert asked[:2] == list(planned)


def test_unknown_names_are_refused():
    with pytest.raises(SelfspecError, match="strategy 'oracle' is not known; known: tpe, cmaes, gp, skopt, random"):
        make_strategy("oracle", Problem(SPACE))
