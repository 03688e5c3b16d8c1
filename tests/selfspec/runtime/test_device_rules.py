"""Rules on the device beside the host's, draft by draft, with the random numbers of the same streams."""

from __future__ import annotations

import pytest
import torch

from selfspec.basics.errors import SelfspecError
from selfspec.runtime.device_rules import SAMPLED, Drafts, follow, sample
from selfspec.runtime.device_tokens import choose
from selfspec.speculation.drafts import Draft
from selfspec.speculation.rules import RULES, greedy
from selfspec.speculation.sampling import Sampler

COUNT, LENGTH, VOCABULARY = 400, 4, 6


def random_scores(n, dtype, seed):
    """Scores `[COUNT, n, VOCABULARY]` that mask some tokens, as with `top_k`."""
    scores = torch.randn(COUNT, n, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return scores.masked_fill(scores < -1, -torch.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", SAMPLED.values(), ids=lambda rule: rule.__name__)
def test_verdicts_are_the_hosts(rule, dtype):
    """For drafts of 0 to 4 tokens, where q is p too, and where p is not finite after some tokens."""
    scores, q = random_scores(1 + LENGTH, dtype, 0), random_scores(LENGTH, dtype, 1).softmax(-1)
    q[:50] = scores[:50, :-1].softmax(-1)
    scores[50:90, 2] = torch.nan
    samplers = [Sampler(temperature=1.0, seed=i, tied=False) for i in range(COUNT)]
    numbers = torch.tensor([one.upcoming(2 * LENGTH + 1) for one in samplers], dtype=torch.float64)
    tokens = torch.stack([choose(q[:, i].log(), None, numbers[:, i]).tokens for i in range(LENGTH)], 1)
    lengths = [i % (1 + LENGTH) for i in range(COUNT)]
    verdicts = rule(Drafts(tokens, torch.tensor(lengths), q, numbers), scores.softmax(-1))
    seen = set()
    for i, (sampler, n) in enumerate(zip(samplers, lengths, strict=True)):
        accepted, following, possible, used = (int(values[i]) for values in verdicts)
        assert tokens[i, :n].tolist() == [sampler.draw(row, 0) for row in q[i, :n]]
        draft = Draft.chain(tokens[i, :n].tolist(), q=q[i, :n] if n else None)
        try:
            verdict = RULES[rule.__name__](draft, scores[i, : 1 + n], sampler, 1)
        except SelfspecError:
            assert not possible
        else:
            assert (accepted, following, bool(possible)) == (len(verdict.path), verdict.token, True)
        assert used == sampler.numbers_used
        seen.add((n, accepted, bool(possible)))
    assert {(n, accepted) for n, accepted, _ in seen} == {(n, a) for n in range(1 + LENGTH) for a in range(1 + n)}
    assert {possible for _, _, possible in seen} == {True, False}


def test_a_token_without_a_draft_is_the_samplers():
    p = random_scores(1, torch.float64, 2)[:, 0].softmax(-1)
    samplers = [Sampler(temperature=1.0, seed=i, tied=False) for i in range(COUNT)]
    numbers = torch.tensor([one.upcoming(1) for one in samplers], dtype=torch.float64)
    verdicts = sample(p, numbers)
    assert verdicts.token.tolist() == [one.draw(row, 0) for one, row in zip(samplers, p, strict=True)]
    assert verdicts.possible.all()
    assert (verdicts.accepted == 0).all()
    assert (verdicts.used == 1).all()


def test_tokens_that_the_target_chooses_are_followed():
    scores = random_scores(1 + LENGTH, torch.float64, 3)
    tokens = scores[:, :-1].argmax(-1)
    tokens[::2, 3] += 1
    lengths = torch.arange(COUNT) % (1 + LENGTH)
    verdicts = follow(tokens, torch.arange(LENGTH) < lengths.unsqueeze(1), choose(scores.flatten(0, 1)))
    for i, n in enumerate(lengths.tolist()):
        verdict = greedy(Draft.chain(tokens[i, :n].tolist()), scores[i, : 1 + n], Sampler(), 1)
        assert (int(verdicts.accepted[i]), int(verdicts.token[i])) == (len(verdict.path), verdict.token)
    assert verdicts.possible.all()
    assert not verdicts.used.any()
