from __future__ import annotations

import itertools
import random

import pytest
import torch

from selfspec.basics.errors import SelfspecError
from selfspec.speculation.drafts import NO_DRAFT, Draft
from selfspec.speculation.rules import block, find_rule, greedy, match, token
from selfspec.speculation.sampling import Sampler


class Coins(Sampler):
    """Coins fall as told; draws take the likeliest token. Notes the chances it was asked about."""

    def __init__(self, *coins):
        super().__init__(temperature=1.0)
        self.coins, self.chances = list(coins), []

    def coin(self, probability):
        self.chances.append(probability)
        return self.coins.pop(0)

    def draw(self, p, position):
        return int(p.argmax())


def judged(rule, *given):
    """The path and the token that a rule gives."""
    path, following, _ = rule(*given)
    return path, following


def scores(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


TARGET = scores([0.1, 0.7, 0.2], [0.6, 0.1, 0.3], [0.2, 0.2, 0.6])


class TestGreedy:
    def test_always(self):
        assert judged(greedy, Draft.chain([1, 0]), TARGET, Sampler(), 0) == ((0, 1), 2)

    def test_never(self):
        assert judged(greedy, Draft.chain([0, 0]), TARGET, Sampler(), 0) == ((), 1)

    def test_sometimes(self):
        assert judged(greedy, Draft.chain([1, 2]), TARGET, Sampler(), 0) == ((0,), 0)

    def test_nothing_drafted(self):
        assert judged(greedy, NO_DRAFT, TARGET[:1], Sampler(), 0) == ((), 1)

    def test_the_deepest_matching_node_wins(self):
        """Two equal children of the root, the second of which goes on to match."""
        draft = Draft((1, 1, 0), (-1, -1, 1), None, (-1, -1, -1))
        table = torch.cat((TARGET[:2], TARGET[1:2], TARGET[2:]))
        assert judged(greedy, draft, table, Sampler(), 0) == ((1, 2), 2)


class TestBlock:
    def test_draft_equal_to_target_is_kept_whole(self):
        q = TARGET[:2].softmax(-1)
        for tokens in itertools.product(range(3), repeat=2):
            sampler = Coins(True)
            assert judged(block, Draft.chain(tokens, q=q), TARGET, sampler, 0) == ((0, 1), 2)
            assert sampler.chances == [1.0]

    def test_one_token_is_verified_as_by_token_rejection(self):
        q = torch.tensor([[0.2, 0.6, 0.2]], dtype=torch.float64)
        for drafted in range(3):
            for coin in (True, False):
                mine, theirs = Coins(coin), Coins(coin)
                draft = Draft.chain([drafted], q=q)
                assert judged(block, draft, TARGET[:2], mine, 0) == judged(token, draft, TARGET[:2], theirs, 0)
                assert mine.chances == pytest.approx(theirs.chances)

    def test_a_likely_end_makes_up_for_an_unlikely_beginning(self):
        """P_1 = .1 / .5 = .2, P_2 = min(1, .2 * .6 / .1) = 1: kept, where token rejection keeps .2 of the time."""
        q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.5, 0.4]], dtype=torch.float64)
        sampler = Coins(True)
        assert judged(block, Draft.chain([0, 0], q=q), TARGET, sampler, 0)[0] == (0, 1)
        assert sampler.chances == [pytest.approx(1.0)]

    def test_the_residual_after_a_broken_block(self):
        """P = (1, .2, .4 / 3): h_1 = R_1 / (R_1 + .8) with R_1 the sum of (.2 p - q)+; after it, that residual."""
        q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.15, 0.75]], dtype=torch.float64)
        left = (0.2 * TARGET[1].softmax(-1) - q[1]).clamp(min=0)  # (.02, 0, 0)
        sampler = Coins(False, True)
        assert judged(block, Draft.chain([0, 1], q=q), TARGET, sampler, 0) == ((0,), 0)
        assert sampler.chances == [
            pytest.approx(0.2 * 0.1 / 0.15),
            pytest.approx(float(left.sum() / (left.sum() + 0.8))),
        ]

    def test_one_hot_proposals_are_accepted_with_p(self):
        sampler = Coins(False)
        assert judged(block, Draft.chain([1]), TARGET[:2], sampler, 0) == ((), 2)  # p without token 1 is (.1, 0, .2)
        assert sampler.chances == [pytest.approx(0.7)]

    def test_below_an_accepted_candidate_a_block_begins_afresh(self):
        q = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]], dtype=torch.float64)
        draft = Draft((0, 1, 0), (-1, -1, 1), q, (0, 0, 1))
        sampler = Coins(False, True, True)
        assert judged(block, draft, TARGET[[0, 1, 1, 2]], sampler, 0) == ((1, 2), 2)
        # p - q = (-.4, .4, 0), so what is left is token 1 alone; below it p(0) / q(0) = .6 / 1.
        assert sampler.chances == pytest.approx([0.2, 1.0, 0.6])


class TestMatch:
    def test_what_is_drawn_with_the_noise_of_its_place_is_kept(self):
        sampler = Sampler(temperature=1.0, seed=3)
        drawn = sampler.draws(TARGET.softmax(-1), [5, 6, 7])
        assert judged(match, Draft.chain(drawn[:2]), TARGET, sampler, 5) == ((0, 1), drawn[2])
        assert judged(match, Draft.chain([drawn[0], (drawn[1] + 1) % 3]), TARGET, sampler, 5) == ((0,), drawn[1])
        assert judged(match, Draft.chain([(drawn[0] + 1) % 3, drawn[1]]), TARGET, sampler, 5) == ((), drawn[0])

    def test_candidates_are_matched_too(self):
        sampler = Sampler(temperature=1.0, seed=3)
        (first,) = sampler.draws(TARGET[:1].softmax(-1), [5])
        draft = Draft(tuple((first + i) % 3 for i in (1, 2, 0)), (-1, -1, -1), None, (-1,) * 3)
        path, following = judged(match, draft, TARGET[[0, 1, 1, 1]], sampler, 5)
        assert path == (2,)
        assert following == sampler.draw(TARGET[1].softmax(-1), 6)

    def test_nothing_drafted(self):
        sampler = Sampler(temperature=1.0, seed=3)
        assert judged(match, NO_DRAFT, TARGET[:1], sampler, 5) == ((), sampler.draw(TARGET[0].softmax(-1), 5))


class TestToken:
    def test_draft_equal_to_target_is_always_accepted(self):
        q = TARGET[:2].softmax(-1)
        for tokens in itertools.product(range(3), repeat=2):
            sampler = Coins(True, True)
            assert judged(token, Draft.chain(tokens, q=q), TARGET, sampler, 0) == ((0, 1), 2)
            assert sampler.chances == [1.0, 1.0]

    def test_rejection_draws_from_the_residual(self):
        q = torch.tensor([[0.2, 0.6, 0.2]], dtype=torch.float64)
        sampler = Coins(False)
        # p - q = (-.1, .1, 0): only token 1 is left.
        assert judged(token, Draft.chain([0], q=q), TARGET[:2], sampler, 0) == ((), 1)
        assert sampler.chances == [pytest.approx(0.5)]

    def test_one_hot_proposals_are_accepted_with_p(self):
        sampler = Coins(False)
        path, following = judged(token, Draft.chain([1]), TARGET[:2], sampler, 0)
        assert sampler.chances == [pytest.approx(0.7)]
        assert (path, following) == ((), 2)  # p without token 1 is (.1, 0, .2)

    def test_candidates_are_removed_from_q_and_r(self):
        q = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
        draft = Draft((0, 2), (-1, -1), q, (0, 0))
        sampler = Coins(False, False)
        # r after token 0: (p - q)+ = (0, .4, 0); token 2 then has no chance, and 1 is what is left.
        assert judged(token, draft, scores(*[[0.1, 0.7, 0.2]] * 3), sampler, 0) == ((), 1)
        assert sampler.chances == [pytest.approx(0.2), 0.0]

    def test_a_residual_of_nothing_draws_from_p(self):
        """Only rounding can reject where q = p; what is drawn then is p, not nan."""
        q = TARGET[:1].softmax(-1)
        assert judged(token, Draft.chain([0], q=q), TARGET[:2], Coins(False), 0) == ((), 1)


def test_rules_are_found_and_refused():
    assert find_rule(None, Sampler()) is greedy
    assert find_rule(None, Sampler(temperature=1.0)) is block
    assert find_rule("token", Sampler(temperature=1.0, seed=1, tied=False)) is token
    assert find_rule(None, Sampler(temperature=1.0, seed=1)) is match
    assert find_rule("match", Sampler(temperature=1.0, tied=True)) is match
    with pytest.raises(SelfspecError, match="'other' is not known; known: greedy, match, block, token"):
        find_rule("other", Sampler())
    with pytest.raises(SelfspecError, match="'token' does not fit temperature 0; expected greedy"):
        find_rule("token", Sampler())
    with pytest.raises(SelfspecError, match="'greedy' does not fit sampling; expected match or block or token"):
        find_rule("greedy", Sampler(temperature=1.0))
    with pytest.raises(SelfspecError, match="'block' does not fit sampling with tied noise; expected match"):
        find_rule("block", Sampler(temperature=1.0, seed=1))


def test_a_random_tree_is_verified_like_a_plain_walk():
    """Greedy verification of many random trees against a direct definition."""
    draw = random.Random(0)
    for _ in range(300):
        nodes = draw.randint(0, 9)
        parents = tuple(draw.randint(-1, i - 1) for i in range(nodes))
        draft = Draft(tuple(draw.randint(0, 2) for _ in range(nodes)), parents, None, (-1,) * nodes)
        table = torch.rand(nodes + 1, 3, dtype=torch.float64)
        best = table.argmax(-1).tolist()
        matching = [
            path
            for path in (draft.path_to(i) for i in range(-1, nodes))
            if all(draft.tokens[i] == best[draft.parents[i] + 1] for i in path)
        ]
        path, following = judged(greedy, draft, table, Sampler(), 0)
        assert path in matching
        assert len(path) == max(map(len, matching))
        assert following == best[(path[-1] if path else -1) + 1]
