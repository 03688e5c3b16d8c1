from __future__ import annotations

import itertools
import random

import pytest
import torch
from models import run, small
from toys import Enumerating, HiddenHead, RandomTree, Scripted, TinyModel, enumerate_outcomes

from selfspec.controllers import AdaptiveThreshold, FixedK, StaticThreshold
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.drafts import NO_DRAFT, Draft
from selfspec.errors import SelfspecError
from selfspec.runtime import Runtime
from selfspec.sampling import Sampler
from selfspec.skip import SkipSet
from selfspec.verify import find_rule, greedy, token


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


def scores(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


TARGET = scores([0.1, 0.7, 0.2], [0.6, 0.1, 0.3], [0.2, 0.2, 0.6])


class TestGreedy:
    def test_always(self):
        assert greedy(Draft.chain([1, 0]), TARGET, Sampler(), 0) == ((0, 1), 2)

    def test_never(self):
        assert greedy(Draft.chain([0, 0]), TARGET, Sampler(), 0) == ((), 1)

    def test_sometimes(self):
        assert greedy(Draft.chain([1, 2]), TARGET, Sampler(), 0) == ((0,), 0)

    def test_nothing_drafted(self):
        assert greedy(NO_DRAFT, TARGET[:1], Sampler(), 0) == ((), 1)

    def test_the_deepest_matching_node_wins(self):
        """Two equal children of the root, the second of which goes on to match."""
        draft = Draft((1, 1, 0), (-1, -1, 1), None, (-1, -1, -1))
        table = torch.cat((TARGET[:2], TARGET[1:2], TARGET[2:]))
        assert greedy(draft, table, Sampler(), 0) == ((1, 2), 2)


class TestToken:
    def test_draft_equal_to_target_is_always_accepted(self):
        q = TARGET[:2].softmax(-1)
        for tokens in itertools.product(range(3), repeat=2):
            sampler = Coins(True, True)
            assert token(Draft.chain(tokens, q=q), TARGET, sampler, 0) == ((0, 1), 2)
            assert sampler.chances == [1.0, 1.0]

    def test_rejection_draws_from_the_residual(self):
        q = torch.tensor([[0.2, 0.6, 0.2]], dtype=torch.float64)
        sampler = Coins(False)
        # p - q = (-.1, .1, 0): only token 1 is left.
        assert token(Draft.chain([0], q=q), TARGET[:2], sampler, 0) == ((), 1)
        assert sampler.chances == [pytest.approx(0.5)]

    def test_one_hot_proposals_are_accepted_with_p(self):
        sampler = Coins(False)
        path, following = token(Draft.chain([1]), TARGET[:2], sampler, 0)
        assert sampler.chances == [pytest.approx(0.7)]
        assert (path, following) == ((), 2)  # p without token 1 is (.1, 0, .2)

    def test_siblings_are_removed_from_q_and_r(self):
        q = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
        draft = Draft((0, 2), (-1, -1), q, (0, 0))
        sampler = Coins(False, False)
        # r after token 0: (p - q)+ = (0, .4, 0); token 2 then has no chance, and 1 is what is left.
        assert token(draft, scores(*[[0.1, 0.7, 0.2]] * 3), sampler, 0) == ((), 1)
        assert sampler.chances == [pytest.approx(0.2), 0.0]

    def test_a_residual_of_nothing_draws_from_p(self):
        """Only rounding can reject where q = p; what is drawn then is p, not nan."""
        q = TARGET[:1].softmax(-1)
        assert token(Draft.chain([0], q=q), TARGET[:2], Coins(False), 0) == ((), 1)


def target_joint(runtime: Runtime, prompt: list[int], n: int, sampler: Sampler) -> dict[tuple[int, ...], float]:
    """p of every continuation of `n` tokens, from a full forward of each prefix."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n):
        longer = {}
        for text, chance in joint.items():
            tokens = [*prompt, *text]
            with runtime.session(len(tokens)):
                logits = runtime.forward(torch.tensor([tokens]), 0, logits="last").logits
            p = sampler.probs(sampler.scores(logits[0], iter([tokens])))[0]
            longer.update({(*text, i): chance * value for i, value in enumerate(p.tolist())})
        joint = longer
    return joint


VOCABULARY, PROMPT = 3, [0, 2, 1]
DRAFTERS = {
    "plain": lambda runtime: PlainDrafter(),
    "chain": lambda runtime: RandomTree(VOCABULARY, (1, 1)),
    "siblings": lambda runtime: RandomTree(VOCABULARY, (2,)),
    "all siblings": lambda runtime: RandomTree(VOCABULARY, (3,)),
    "chain with siblings": lambda runtime: RandomTree(VOCABULARY, (2, 1)),
    "siblings below": lambda runtime: RandomTree(VOCABULARY, (1, 2)),
    "one-hot": lambda runtime: Scripted(lambda tokens: [sum(tokens) % 3, len(tokens) % 3], 2),
    "hidden head": HiddenHead,
    "tiny model": lambda runtime: TinyModel(Runtime(small(VOCABULARY, 1, seed=9)), 2),
    "layer skip, fixed": lambda runtime: LayerSkipDrafter(runtime, SkipSet((0,), (1,)), FixedK(2)),
    "layer skip, static": lambda runtime: LayerSkipDrafter(runtime, SkipSet((1,), (1,)), StaticThreshold(0.4, 2)),
    "layer skip, siblings": lambda runtime: LayerSkipDrafter(
        runtime, SkipSet((1,), (1,)), StaticThreshold(0.4, 2), siblings=2
    ),
    "layer skip, adaptive": lambda runtime: LayerSkipDrafter(
        runtime, SkipSet((0,), (0,)), AdaptiveThreshold(threshold=0.5, step=1.0, k_max=2)
    ),
}


@pytest.fixture(scope="module")
def runtime():
    return Runtime(small(VOCABULARY, 2, seed=4))


# All siblings over four tokens are a hundred thousand paths: two and three cover them.
CASES = [(name, room) for name in DRAFTERS for room in (2, 3, 4) if (name, room) != ("all siblings", 4)]


@pytest.mark.parametrize(("name", "room"), CASES)
def test_token_rejection_follows_the_target_exactly(runtime, name, room):
    """The shipped loop and rule, every path through their coins and draws: the joint law of several rounds."""
    joint: dict[tuple[int, ...], float] = {}

    def once(sampler):
        return tuple(run(runtime, DRAFTERS[name](runtime), PROMPT, room, sampler=sampler)[0])

    for text, weight in enumerate_outcomes(once):
        joint[text] = joint.get(text, 0.0) + weight
    expected = target_joint(runtime, PROMPT, room, Enumerating())
    assert joint.keys() <= expected.keys()
    assert max(abs(joint.get(text, 0.0) - chance) for text, chance in expected.items()) < 1e-9


def test_the_harness_sees_a_wrong_rule(runtime):
    """A bonus token drawn from p of the wrong row is far outside the harness's tolerance."""

    def wrong(draft, scores, sampler, position):
        path, _ = token(draft, scores, sampler, position)
        return path, sampler.draw(sampler.probs(scores)[0], position)

    from selfspec.decode import decode
    from selfspec.drafts import SequenceState

    joint: dict[tuple[int, ...], float] = {}

    def once(sampler):
        seq = SequenceState(list(PROMPT), 3, sampler)
        list(decode(runtime, RandomTree(VOCABULARY, (1, 1)), seq, rule=wrong))
        return tuple(seq.tokens[3:])

    for text, weight in enumerate_outcomes(once):
        joint[text] = joint.get(text, 0.0) + weight
    expected = target_joint(runtime, PROMPT, 3, Enumerating())
    assert max(abs(joint.get(text, 0.0) - chance) for text, chance in expected.items()) > 1e-3


def test_rules_are_found_and_refused():
    assert find_rule(None, Sampler()) is greedy
    assert find_rule(None, Sampler(temperature=1.0)) is token
    with pytest.raises(SelfspecError, match="'other' is not known; known: greedy, token"):
        find_rule("other", Sampler())
    with pytest.raises(SelfspecError, match="does not fit temperature 0"):
        find_rule("token", Sampler())
    with pytest.raises(SelfspecError, match="does not fit sampling"):
        find_rule("greedy", Sampler(temperature=1.0))


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
        path, following = greedy(draft, table, Sampler(), 0)
        assert path in matching
        assert len(path) == max(map(len, matching))
        assert following == best[(path[-1] if path else -1) + 1]
