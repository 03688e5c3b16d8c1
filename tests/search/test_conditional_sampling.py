"""One step of sampled replay against one step of real drafting and verification, by enumeration."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from selfspec.search.conditional_sampling import Uniforms, draft_given_text
from toys import Branching, enumerate_outcomes

from selfspec.speculation.drafts import Draft
from selfspec.speculation.rules import token as token_rule

CASES = {
    "unlike": ([0.5, 0.2, 0.2, 0.1], [0.1, 0.3, 0.2, 0.4]),
    "alike": ([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]),
    "top-k of both": ([0.7, 0.3, 0.0, 0.0], [0.0, 0.6, 0.4, 0.0]),
    "apart": ([1.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.25, 0.25]),
    "nearly one": ([0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]),
}


def law(run):
    joint = defaultdict(float)
    for outcome, weight in enumerate_outcomes(run):
        joint[outcome] += weight
    return joint


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("candidates", [1, 2, 3])
def test_the_joint_law_is_that_of_a_real_round(case, candidates):
    """Text's token, drafted token, accepted or not, and which candidate was the text's."""
    p, q = (torch.tensor(values, dtype=torch.float64) for values in CASES[case])

    def real(sampler):
        drawn, left = [], q.clone()
        while len(drawn) < candidates and left.sum() > 0:
            drawn.append(sampler.draw(left, 0))
            left[drawn[-1]] = 0
        chain = Draft.chain(drawn[:1], q=q[None])
        draft = chain.with_candidates([drawn[1:]])
        scores = p.log().expand(1 + len(draft), -1)
        path, following, _ = token_rule(draft, scores, sampler, 0)
        text = draft.tokens[path[0]] if path else following
        return text, drawn[0], path == (0,), path[0] if path else 0

    def replayed(sampler):
        text = sampler.draw(p, 0)
        drafted, accepted, rank = draft_given_text(
            p[None], q[None], torch.tensor([text]), torch.tensor([True]), Branching(sampler), candidates
        )
        return text, int(drafted), bool(accepted), int(rank)

    expected, found = law(real), law(replayed)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    for outcome in {*expected, *found}:
        assert found[outcome] == pytest.approx(expected[outcome], abs=1e-9), outcome


def test_a_planted_error_is_caught():
    """Drawing the rejected token from q itself, in place of norm((q - p)+), is another law."""
    p, q = (torch.tensor(values, dtype=torch.float64) for values in CASES["unlike"])

    def wrong(sampler):
        text = sampler.draw(p, 0)
        accepted = sampler.coin(min(1.0, float(q[text] / p[text])))
        return text, text if accepted else sampler.draw(q, 0), accepted

    def right(sampler):
        text = sampler.draw(p, 0)
        drafted, accepted, _ = draft_given_text(
            p[None], q[None], torch.tensor([text]), torch.tensor([True]), Branching(sampler), 1
        )
        return text, int(drafted), bool(accepted)

    a, b = law(right), law(wrong)
    assert max(abs(a[o] - b[o]) for o in {*a, *b}) > 0.01


def test_unmatched_rows_draw_from_the_draft():
    p, q = (torch.tensor([values], dtype=torch.float64) for values in CASES["unlike"])

    def replayed(sampler):
        return int(draft_given_text(p, q, torch.tensor([0]), torch.tensor([False]), Branching(sampler), 3)[0])

    found = law(replayed)
    assert [found[i] for i in range(4)] == pytest.approx(CASES["unlike"][1])


def test_uniforms_draw_by_weight_and_never_what_has_none():
    weights = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]])
    numbers = torch.tensor([[0.0], [0.2], [0.25], [0.9], [1.0 - 1e-17]], dtype=torch.float64)
    drawn = Uniforms(numbers).draw(weights.expand(5, -1), 0)
    assert drawn.tolist() == [1, 1, 3, 3, 3]
    chance = torch.tensor([0.0, 0.1, 0.3, 0.9, 0.5], dtype=torch.float64)
    assert Uniforms(numbers).coin(chance, 0).tolist() == [False, False, True, False, False]
