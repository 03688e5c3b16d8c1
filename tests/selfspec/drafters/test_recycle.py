"""Token recycling: the table is what the model's own logits said last, and drafts follow from it."""

from __future__ import annotations

import pytest
import torch
from models import plain, run, small

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.drafters import InputDrafter, Limit, PlainDrafter, RecycleDrafter
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

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


ENDS = frozenset([99])


def follow(prompt, answer, most=8):
    """The drafts for an answer that is known; none is verified by a model."""
    drafter = InputDrafter(FixedK(most))
    seq = SequenceState(list(prompt), len(answer), Sampler(), ENDS)
    drafter.begin(seq, ForwardOutput(None, torch.empty(1, 0, 1)))
    drafts, done = [], 0
    while seq.remaining:
        limit = Limit(min(most, seq.remaining - 1))
        (draft,) = drafter.propose([seq], [limit]) if limit.depth else [type(drafts[0])()]
        right = 0
        while right < len(draft) and draft.tokens[right] == answer[done + right]:
            right += 1
        tokens = seq.emit(answer[done : done + right + 1])
        drafter.observe(seq, Outcome(draft, tuple(range(right)), tokens, ForwardOutput(None, torch.empty(1, 0, 1))))
        drafts.append(draft)
        done += len(tokens)
    drafter.end(seq)
    return drafts


def test_a_copy_takes_a_pass_for_each_draft():
    text = list(range(10, 40))
    drafts = follow(text, text)
    assert [len(draft) for draft in drafts] == [8, 8, 8, 2]
    assert drafts[1].tokens == tuple(text[9:17])


@pytest.mark.parametrize(
    ("change", "drafted"),
    [
        (lambda text: [*text[:12], 50, *text[13:]], [8, 8, 0, 8, 6]),  # a token exchanged, and one to find the anchor
        (lambda text: [*text[:12], *text[14:]], [8, 8, 8, 5]),  # two left out: what comes instead is an anchor itself
        (lambda text: [*text[:12], 50, 51, *text[12:]], [8, 8, 0, 0, 8, 7]),  # two put in
    ],
)
def test_after_a_divergence_it_is_anchored_again(change, drafted):
    text = list(range(10, 40))
    assert [len(draft) for draft in follow(text, change(text))] == drafted


def test_of_several_places_the_longer_match_and_then_the_next_one_is_taken():
    text = [1, 2, 3, 4, 9, 2, 3, 5, 9, 2, 3, 6]
    assert follow(text, [9, 2, 3, 5, 9, 2, 3, 6])[1].tokens[:3] == (2, 3, 5)
    drafts = follow(text, [1, 2, 3, 4, 7, 2, 3, 5, 9, 2, 3, 6])
    assert any(draft.tokens[:4] == (3, 5, 9, 2) for draft in drafts)


def test_nothing_is_drafted_where_the_answer_left_the_input():
    assert [len(draft) for draft in follow([1, 2, 3], [7, 8, 7, 8])] == [3, 0, 0, 0]


def test_an_end_of_sequence_in_the_input_ends_the_draft():
    assert follow([1, 2, 99, 4, 5], [1, 2, 4, 5])[0].tokens == (1, 2, 99)
