"""Token recycling: the table is what the model's own logits said last, and drafts follow from it."""

from __future__ import annotations

import pytest
from models import plain, run, small

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.drafters import PlainDrafter, RecycleDrafter
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler

VOCABULARY, PROMPT, NEW = 11, [1, 4, 2, 9], 40


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(VOCABULARY, seed=2))


@pytest.fixture(scope="module")
def likeliest(runtime):
    """By place of the greedy text, the tokens in the order of the model's logits there."""
    _, outcomes = run(runtime, PlainDrafter(), PROMPT, NEW)
    return [outcome.step.logits[0, 0].argsort(descending=True).tolist() for outcome in outcomes]


def test_drafts_are_what_was_likeliest_after_each_token_before(runtime, likeliest):
    text = [*PROMPT, *plain(runtime, PROMPT, NEW)]
    drafter = RecycleDrafter(FixedK(4), candidates=3)
    tokens, outcomes = run(runtime, drafter, PROMPT, NEW)
    assert [*PROMPT, *tokens] == text
    table, at, drafted = {}, len(PROMPT), 0
    for outcome in outcomes:
        chain, token = [], text[at - 1]
        while len(chain) < min(4, len(text) - at - 1) and token in table:
            token = table[token][0]
            chain.append(token)
        n = len(chain)
        assert list(outcome.draft.tokens[:n]) == chain
        places = [text[at - 1], *chain]
        for node in range(n, len(outcome.draft)):
            parent = places[outcome.draft.parents[node] + 1]
            assert outcome.draft.tokens[node] in table[parent][1:3]
        drafted += n
        for token in outcome.tokens:
            table[text[at - 1]] = likeliest[at - len(PROMPT)]
            assert text[at] == token
            at += 1
    assert drafted > 20
    assert len(outcomes) < NEW


def test_a_seed_starts_from_an_empty_table(runtime):
    """What one sequence has learnt is nothing to another that has a seed; all others go on with it."""
    drafter = RecycleDrafter(FixedK(4), candidates=2)
    first = [run(runtime, drafter, PROMPT, NEW, sampler=Sampler(temperature=0.9, seed=s))[1] for s in (5, 6, 5)]
    assert [o.draft.tokens for o in first[0]] == [o.draft.tokens for o in first[2]]
    assert not first[0][1].draft.tokens
    run(runtime, drafter, PROMPT, NEW)
    assert run(runtime, drafter, PROMPT, NEW)[1][1].draft.tokens


def test_candidates_out_of_range():
    for wrong in (0, 99):
        with pytest.raises(SelfspecError, match=f"candidates {wrong}: expected 1"):
            RecycleDrafter(FixedK(2), candidates=wrong)
