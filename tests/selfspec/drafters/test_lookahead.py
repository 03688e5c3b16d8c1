"""Lookahead decoding: the window's levels follow from the passes' logits, and the pool holds its diagonals."""

from __future__ import annotations

import pytest
from models import plain, run, small

from selfspec.basics.errors import SelfspecError
from selfspec.drafters import LookaheadDrafter
from selfspec.runtime.forward import LeanRuntime

VOCABULARY, PROMPT, NEW = 11, [1, 4, 2, 9], 40
W, N, G = 4, 3, 2


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(VOCABULARY, seed=2))


@pytest.fixture(scope="module")
def outcomes(runtime):
    tokens, outcomes = run(runtime, LookaheadDrafter(window=W, ngram=N, guesses=G), PROMPT, NEW)
    assert tokens == plain(runtime, PROMPT, NEW)
    return outcomes


def below(draft, parent, token):
    """The node of a token below another node."""
    return next(n for n in range(len(draft)) if draft.parents[n] == parent and draft.tokens[n] == token)


def test_window_and_pool_as_the_paper_has_them(outcomes):
    levels = [[PROMPT[(i + j) % len(PROMPT)] for i in range(W)] for j in range(N - 1)]
    pool, last, done, rounds = {}, outcomes[0].tokens[-1], 1, 0
    for outcome in outcomes[1:]:
        draft = outcome.draft
        if NEW - done - 1 < W + N - 2:
            break  # no room for a window any more
        nodes, node = [], -1
        for token in levels[0]:
            node = below(draft, node, token)
            nodes.append(node)
        for level in levels[1:]:
            nodes = [below(draft, above, token) for above, token in zip(nodes, level, strict=True)]
        for gram in pool.get(last, []):
            node = -1
            for token in gram:
                node = below(draft, node, token)
        assert len(draft) <= W * (N - 1) + G * (N - 1)
        found = outcome.step.logits[0, [n + 1 for n in nodes]].argmax(-1).tolist()
        for i, token in enumerate(found):
            gram = (*(level[i] for level in levels[1:]), token)
            held = [other for other in pool.get(levels[0][i], []) if other != gram]
            pool[levels[0][i]] = [*held, gram][-G:]
        levels = [*levels[1:], found]
        last, done, rounds = outcome.tokens[-1], done + len(outcome.tokens), rounds + 1
    assert rounds > 10


def test_a_repeating_text_takes_few_passes(runtime, outcomes):
    assert len(outcomes) < NEW
    looping = plain(runtime, PROMPT, 60)
    _, later = run(runtime, LookaheadDrafter(window=W, ngram=N, guesses=G), [*PROMPT, *looping], NEW)
    assert len(later) < 0.6 * NEW


def test_nothing_hangs_below_an_end(runtime):
    ends = frozenset([2, 9, 0])
    drafted, at_ends = 0, 0
    for first in range(VOCABULARY):  # texts that end at different places
        prompt = [first, *PROMPT]
        _, outcomes = run(runtime, LookaheadDrafter(window=W, ngram=N, guesses=G), prompt, NEW, ends=ends)
        for outcome in outcomes:
            draft = outcome.draft
            drafted += len(draft)
            at_ends += sum(token in ends for token in draft.tokens)
            assert all(parent < 0 or draft.tokens[parent] not in ends for parent in draft.parents)
    assert drafted > 50
    assert at_ends > 0


def test_sizes_out_of_range():
    for wrong in ({"window": 0}, {"ngram": 1}, {"guesses": 0}, {"window": 33, "ngram": 3}):
        with pytest.raises(SelfspecError, match="expected a window of at least 1 token"):
            LookaheadDrafter(**wrong)
