"""The law of what sampling emits, by enumeration: every path through the coins and draws of the shipped loop and rules.

Several rounds over a vocabulary of three, against the whole model's own probabilities; and bugs known from elsewhere,
planted, each of which the same harness must see.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from every_drafter import table
from models import run_drafting, small
from toys import (
    Adding,
    Doubled,
    Enumerating,
    HiddenHead,
    RandomTree,
    Reusing,
    Scripted,
    Staged,
    enumerate_outcomes,
    target_distributions,
)
from trained import learnt
from transformers.generation import logits_process as hf

from selfspec import drafters
from selfspec.controllers import AdaptiveThreshold, FixedK, RateOptimal, StaticThreshold
from selfspec.drafters import tree_merge as merging
from selfspec.models.low_precision import fake
from selfspec.proposers.base import ProposerChain
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation import rules as verify
from selfspec.speculation.drafts import Draft
from selfspec.speculation.rules import Verdict
from selfspec.types.acceptance import AcceptanceCurve, Confidence, PayoffModel
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.methods import MOST_ROWS

VOCABULARY, PROMPT = 3, [0, 2, 1]
EXACT, SEEN = 1e-9, 1e-3
# By which how many candidates stand beside a token, and whether another is drafted, depends on its confidence.
UNSURE = PayoffModel(
    0.2,
    tuple(1 + 0.5 * rows for rows in range(MOST_ROWS + 1)),
    AcceptanceCurve(accepted=[0.6, 1.0], following=[0.6, 1.0], candidates=[[0.9, 0.0], [0.8, 0.0]]),
)
LOW = DraftPath(SkipSet((0,)), None, SkipSet((1,), (0, 1)), head="int8")
TRAINED = DraftPath(SkipSet((1,), (1,)), None, SkipSet((0,), (0,)), head="int8")
FEW_WORDS = DraftPath(LOW.skip, (0, 2), LOW.int8, head="int8")
BY_GAP = Confidence(bias=-0.5, probability=0.3, gap=0.7)
LOOKUP_PRIOR = ProposerChain([Adding(VOCABULARY)], (1.0, 1.0, 1.0))  # as many as there may be


class Beside(Staged):
    """What the inner round rejected is proposed, too: behind the token that was drawn in its place, or before it."""

    before = False

    def made(self, outcome):
        draft, (kept, tried) = super().made(outcome), (outcome.path, outcome.draft.tokens)
        at = len(kept)
        if at == len(tried) or at >= len(draft) or tried[at] == draft.tokens[at]:
            return draft
        n = at + 1  # the draft up to what was drawn; behind it, or before it, the rejected one
        parents = (*range(-1, at), at - 1)
        if self.before:
            tokens, rows = (*draft.tokens[:at], tried[at], draft.tokens[at]), (*range(at), -1, at)
        else:
            tokens, rows = (*draft.tokens[:n], tried[at]), (*range(n), -1)
        return Draft(tokens, parents, draft.q[:n], rows)


class Backwards(RandomTree):
    """Likely where the other is not."""

    def q(self, prefix):
        return super().q(prefix).flip(0)


DRAFTERS = {
    "plain": lambda runtime: drafters.PlainDrafter(),
    "chain": lambda runtime: RandomTree(VOCABULARY, (1, 1)),
    "long chain": lambda runtime: RandomTree(VOCABULARY, (1, 1, 1)),
    "candidates": lambda runtime: RandomTree(VOCABULARY, (2,)),
    "all candidates": lambda runtime: RandomTree(VOCABULARY, (3,)),
    "chain with candidates": lambda runtime: RandomTree(VOCABULARY, (2, 1)),
    "candidates below": lambda runtime: RandomTree(VOCABULARY, (1, 2)),
    "one-hot": lambda runtime: Scripted(lambda tokens: [sum(tokens) % 3, len(tokens) % 3], 2),
    "hidden head": HiddenHead,
    "draft model": lambda runtime: drafters.ModelDrafter(runtime, LeanRuntime(small(VOCABULARY, 1, seed=9)), FixedK(2)),
    "draft model, candidates": lambda runtime: drafters.ModelDrafter(
        runtime, LeanRuntime(small(VOCABULARY, 1, seed=9)), StaticThreshold(0.4, 2), candidates=2
    ),
    "staged": lambda runtime: Staged(LeanRuntime(small(VOCABULARY, 1, seed=9)), RandomTree(VOCABULARY, (1, 1)), 2),
    "staged, candidates": lambda runtime: Staged(
        LeanRuntime(small(VOCABULARY, 1, seed=9)), RandomTree(VOCABULARY, (2,)), 2
    ),
    "three stages": lambda runtime: Staged(
        LeanRuntime(small(VOCABULARY, 1, seed=9)),
        Staged(LeanRuntime(small(VOCABULARY, 1, seed=5)), RandomTree(VOCABULARY, (1,)), 1),
        2,
    ),
    "staged, a rejected proposal behind the drawn token": lambda runtime: Beside(
        LeanRuntime(small(VOCABULARY, 1, seed=9)), RandomTree(VOCABULARY, (1,)), 2
    ),
    "layer skip, fixed": lambda runtime: drafters.LayerSkipDrafter(runtime, SkipSet((0,), (1,)), FixedK(2)),
    "layer skip, static": lambda runtime: drafters.LayerSkipDrafter(
        runtime, SkipSet((1,), (1,)), StaticThreshold(0.4, 3)
    ),
    "layer skip, candidates": lambda runtime: drafters.LayerSkipDrafter(
        runtime, SkipSet((1,), (1,)), StaticThreshold(0.4, 2), candidates=2
    ),
    "layer skip, draft vocabulary": lambda runtime: drafters.LayerSkipDrafter(
        runtime, DraftPath(SkipSet((0,), (1,)), (0, 2)), FixedK(2)
    ),
    "layer skip, adaptive": lambda runtime: drafters.LayerSkipDrafter(
        runtime, SkipSet((0,), (0,)), AdaptiveThreshold(threshold=0.5, step=1.0, k_max=2)
    ),
    "layer skip, rate": lambda runtime: drafters.LayerSkipDrafter(
        runtime, SkipSet((1,), (1,)), RateOptimal(floor=0.0, k_max=2, payoff=UNSURE), candidates=3
    ),
    "few bits, by gap": lambda runtime: drafters.LayerSkipDrafter(
        runtime, LOW, StaticThreshold(0.4, 3), confidence=BY_GAP
    ),
    "trained path": lambda runtime: drafters.LayerSkipDrafter(
        runtime, learnt(runtime, TRAINED, size=1.0), StaticThreshold(0.3, 3)
    ),
    "few bits, candidates": lambda runtime: drafters.LayerSkipDrafter(
        runtime, LOW, RateOptimal(floor=0.0, k_max=2, payoff=UNSURE), candidates=3, confidence=BY_GAP
    ),
    "few bits, draft vocabulary": lambda runtime: drafters.LayerSkipDrafter(runtime, FEW_WORDS, FixedK(2)),
    "lookup tokens": lambda runtime: drafters.LayerSkipDrafter(
        runtime, SkipSet((0,), (1,)), StaticThreshold(0.3, 3), proposer_chain=LOOKUP_PRIOR
    ),
    "lookup tokens, candidates": lambda runtime: drafters.LayerSkipDrafter(
        runtime, LOW, StaticThreshold(0.4, 2), candidates=2, confidence=BY_GAP, proposer_chain=LOOKUP_PRIOR
    ),
    "lookup tokens alone": lambda runtime: drafters.LookupDrafter([Adding(VOCABULARY)], StaticThreshold(0.1, 2)),
    "merged": lambda runtime: drafters.MergedDrafter(
        [drafters.LayerSkipDrafter(runtime, SkipSet((0,), (1,)), FixedK(1)), RandomTree(VOCABULARY, (1, 1))]
    ),
    "merged, of one law": lambda runtime: drafters.MergedDrafter(
        [Backwards(VOCABULARY, (1,)), Backwards(VOCABULARY, (1, 1))]
    ),
    "merged, a lookup token first": lambda runtime: drafters.MergedDrafter(
        [drafters.LookupDrafter([Adding(VOCABULARY)], StaticThreshold(0.1, 2)), RandomTree(VOCABULARY, (1, 1))]
    ),
    "merged, a lookup token last": lambda runtime: drafters.MergedDrafter(
        [RandomTree(VOCABULARY, (2,)), drafters.LookupDrafter([Adding(VOCABULARY)], StaticThreshold(0.1, 2))]
    ),
    "input": lambda runtime: drafters.InputDrafter(FixedK(2)),
    "jacobi": lambda runtime: drafters.JacobiDrafter("gauss-seidel", block=3),
    "draft model of other tokens": lambda runtime: drafters.CrossVocabularyDrafter(
        runtime, LeanRuntime(small(2 * VOCABULARY, 1, seed=9)), Doubled(VOCABULARY), FixedK(2)
    ),
    "swift": lambda runtime: drafters.SwiftDrafter(runtime, StaticThreshold(0.1, 4), window=6, every=1, candidates=2),
    "clasp": lambda runtime: drafters.ClaspDrafter(runtime, FixedK(2), skip=1, every=1),
    "lookahead": lambda runtime: drafters.LookaheadDrafter(window=1, ngram=3, guesses=1),
    "guarded": lambda runtime: drafters.Guard(RandomTree(VOCABULARY, (1, 1)), clock=itertools.count().__next__),
}
TABLE = table(VOCABULARY, 2)
SETTINGS = {
    "temperature": lambda: [hf.TemperatureLogitsWarper(0.5)],
    "penalty, top-k": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.5), hf.TopKLogitsWarper(2)],
    "no repeat, top-p": lambda: [hf.NoRepeatNGramLogitsProcessor(3), hf.TopPLogitsWarper(0.8)],
}


@pytest.fixture(scope="module")
def runtime():
    made = LeanRuntime(small(VOCABULARY, 2, seed=4), kernel=fake)
    kept = [made.compile(path) for path in (LOW, FEW_WORDS)]  # once for all
    yield made
    del kept


def target_joint(runtime, n, sampler):
    """p of every continuation of `n` tokens, from a full forward of each prefix."""
    joint = {(): 1.0}
    for _ in range(n):
        longer = {}
        for text, chance in joint.items():
            tokens = [*PROMPT, *text]
            with runtime.session(len(tokens)):
                logits = runtime.forward(torch.tensor([tokens]), 0, logits="last").logits
            p = sampler.probs(sampler.scores(logits[0], iter([tokens])))[0]
            longer.update({(*text, i): chance * value for i, value in enumerate(p.tolist())})
        joint = longer
    return joint


def deviation(runtime, make, room, *, rule, kind=Enumerating, processors=()):
    """The largest difference between the law of `room` emitted tokens and the target's."""
    joint = {}

    def once(sampler):
        return tuple(run_drafting(runtime, make(runtime), PROMPT, room, sampler=sampler, rule=rule)[0])

    for text, weight in enumerate_outcomes(once, kind, processors):
        joint[text] = joint.get(text, 0.0) + weight
    expected = target_joint(runtime, room, Enumerating(processors=processors))
    assert joint.keys() <= expected.keys()
    return max(abs(joint.get(text, 0.0) - chance) for text, chance in expected.items())


# Two and three tokens cover what would be ten or a hundred thousand paths over four.
MANY = (
    "long chain",
    "merged",
    "merged, of one law",
    "merged, a lookup token first",
    "merged, a lookup token last",
    "draft model",
    "draft model, candidates",
    "staged",
    "staged, a rejected proposal behind the drawn token",
    "staged, candidates",
    "three stages",
    "all candidates",
    "chain with candidates",
    "candidates below",
    "layer skip, candidates",
    "layer skip, rate",
    "few bits, candidates",
    "lookup tokens, candidates",
)
LONG = ("plain", "chain", "one-hot", "candidates", "layer skip, candidates")  # of which four tokens are always tried
RULES = {"token": verify.token, "block": verify.block}


def left_out(rule, name, room):
    """Whether a case is one of `make proof` alone: what others show of drafts so long under that rule is as much."""
    return name not in LONG if room == 4 else room == 3 and name in MANY and rule == "token"


def marks(rule, name, room):
    """What leaves a case to `make test-all`, or to `make proof`."""
    if left_out(rule, name, room):
        return [pytest.mark.proof]
    return [pytest.mark.long("laws of long drafts")] if room > 2 and name not in LONG else []


CASES = [
    pytest.param(rule, name, room, marks=marks(rule, name, room))
    for rule in RULES
    for name in DRAFTERS
    for room in (2, 3, 4)
    if name not in MANY or room < 4
]


@pytest.mark.parametrize(("rule", "name", "room"), CASES)
def test_what_is_emitted_follows_the_target_exactly(runtime, rule, name, room):
    assert deviation(runtime, DRAFTERS[name], room, rule=rule) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", TABLE)
def test_two_tokens_of_every_drafter_follow_the_target_exactly(runtime, rule, name):
    assert deviation(runtime, TABLE[name], 2, rule=rule) < EXACT


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["chain", "candidates", "layer skip, static", "few bits, by gap"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_processed_scores_are_followed_exactly(runtime, rule, name, settings):
    assert deviation(runtime, DRAFTERS[name], 3, rule=rule, processors=SETTINGS[settings]()) < EXACT


def test_candidates_depend_on_confidence(runtime):
    """So that the law above is that of counts which differ from draft to draft."""
    counts = set()

    def once(sampler):
        drafter = DRAFTERS["layer skip, rate"](runtime)
        _, outcomes = run_drafting(runtime, drafter, PROMPT, 3, sampler=sampler, rule="token")
        counts.update((len(o.draft.confidence), len(o.draft)) for o in outcomes)

    for _ in enumerate_outcomes(once):
        pass
    assert counts >= {(1, 1), (1, 2), (1, 3)}


class WrongTemperature(RandomTree):
    """Draws from q and says that it was q at temperature .5."""

    def draft(self, seq):
        draft = super().draft(seq)
        q = None if draft.q is None else draft.q**2 / (draft.q**2).sum(-1, keepdim=True)
        return Draft(draft.tokens, draft.parents, q, draft.q_row)


class Withholding(RandomTree):
    """Leaves a drawn token out when its own probability is low, and what would have come after it."""

    def draft(self, seq):
        draft = super().draft(seq)
        sure = [float(draft.q[i, token]) >= 0.4 for i, token in enumerate(draft.tokens)]
        n = sure.index(False) if False in sure else len(sure)
        return Draft.chain(draft.tokens[:n], q=draft.q[:n] if n else None)


class Merging(RandomTree):
    """A deterministic proposal, which is removed from q before a second candidate is drawn from it."""

    removed = True

    def draft(self, seq):
        if seq.remaining < 2:
            return Draft()
        proposal = sum(seq.tokens) % VOCABULARY
        q = self.q(seq.tokens)
        if self.removed:
            q[proposal] = 0
        q = q / q.sum()
        drawn = seq.sampler.draw(q, len(seq.tokens))
        return Draft.chain([proposal]) if drawn == proposal else Draft((proposal, drawn), (-1, -1), q[None], (-1, 0))


class Deduplicating(Merging):
    """A deterministic proposal, and a drawn candidate that is left out where it is the same token."""

    removed = False


class Insisting(drafters.LayerSkipDrafter):
    """Puts the lookup token in the place of the drawn one."""

    def _draft(self, chain, logits):
        predicted = chain.lookup_tokens[:1]
        super()._draft(chain, logits)
        chain.tokens[-1:] = predicted or chain.tokens[-1:]


class Before(Beside):
    """The rejected proposal comes first, as if it had been chosen without a look at what was drawn."""

    before = True


class Uncorrected(Staged):
    """Leaves out what the inner round drew in the place of a rejected proposal."""

    def made(self, outcome):
        kept = len(outcome.path) + (len(outcome.path) == len(outcome.draft))
        return Draft.chain(outcome.tokens[:kept], q=target_distributions(outcome)[:kept] if kept else None)


class OfTheResidual(Staged):
    """Says of what the inner round drew in the place of a rejected proposal that it was drawn from the residual."""

    def made(self, outcome):
        draft, at = super().made(outcome), len(outcome.path)
        if at == len(outcome.draft) or at >= len(draft):
            return draft
        left = (draft.q[at] - outcome.draft.q[at]).clamp(min=0)
        q = draft.q.clone()
        q[at] = left / left.sum()
        return Draft.chain(draft.tokens, q=q)


class OfTheInnerDraft(Staged):
    """Says of all tokens that they were drawn from what the inner proposals were."""

    def made(self, outcome):
        draft, q = super().made(outcome), outcome.draft.q
        n = 0 if q is None else min(len(draft), len(q))
        return Draft.chain(draft.tokens[:n], q=q[:n] if n else None)


def staged(kind):
    return lambda runtime: kind(LeanRuntime(small(VOCABULARY, 1, seed=9)), RandomTree(VOCABULARY, (1,)), 2)


def following_from(change):
    """A rule whose token after a wholly accepted draft follows `change(scores)` in place of p."""

    def plant(rule):
        def wrong(draft, scores, sampler, position):
            path, following, p = rule(draft, scores, sampler, position)
            row = path[-1] + 1 if path else 0
            if not draft.children[row]:
                following = sampler.draw(change(scores)[row].softmax(-1), position + len(path))
            return Verdict(path, following, p)

        return wrong

    return plant


def each_round(rule):
    """Tells a `Reusing` sampler that a round begins."""

    def wrong(draft, scores, sampler, position):
        sampler.new_round()
        return rule(draft, scores, sampler, position)

    return wrong


CHAIN, CANDIDATES = DRAFTERS["chain"], DRAFTERS["candidates"]
WRONG_DRAFTERS = {
    "q of another temperature": lambda runtime: WrongTemperature(VOCABULARY, (1, 1)),
    "a low-confidence token withheld": lambda runtime: Withholding(VOCABULARY, (1, 1)),
    "a drawn duplicate removed": lambda runtime: Deduplicating(VOCABULARY),
    "a lookup token in the place of the drawn one": lambda runtime: Insisting(
        runtime, SkipSet((0,), (1,)), FixedK(2), proposer_chain=LOOKUP_PRIOR
    ),
    "an inner correction left out": staged(Uncorrected),
    "the inner residual taken for q": staged(OfTheResidual),
    "q of the inner proposals": staged(OfTheInnerDraft),
    "a rejected proposal before the drawn token": staged(Before),
}
RIGHT = {  # what those are made of; the others are among `DRAFTERS`
    "a lookup token that q leaves out": lambda runtime: Merging(VOCABULARY),
    "lookup tokens beside the drawn one": lambda runtime: drafters.LayerSkipDrafter(
        runtime, SkipSet((0,), (1,)), FixedK(2), proposer_chain=LOOKUP_PRIOR
    ),
    "a round within a round": staged(Staged),
}
WARM = [hf.TemperatureLogitsWarper(0.5)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", WRONG_DRAFTERS)
def test_a_wrong_drafter_is_seen(runtime, name, rule):
    assert deviation(runtime, WRONG_DRAFTERS[name], 3, rule=rule) > SEEN


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", RIGHT)
def test_the_right_one_beside_it_is_not(runtime, name, rule):
    assert deviation(runtime, RIGHT[name], 3, rule=rule) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["merged, of one law", "merged, a lookup token first"])
def test_a_drawn_token_dropped_because_another_drafter_proposed_it_is_seen(runtime, rule, name, monkeypatch):
    monkeypatch.setattr(merging, "merged", lambda drafts, *, drawn, merged=merging.merged: merged(drafts, drawn=False))
    assert deviation(runtime, DRAFTERS[name], 3, rule=rule) > SEEN


@pytest.mark.parametrize("rule", RULES)
def test_a_bonus_from_raw_logits_is_seen(runtime, rule):
    wrong = following_from(lambda scores: scores * 0.5)(RULES[rule])
    assert deviation(runtime, CHAIN, 3, rule=rule, processors=WARM) < EXACT
    assert deviation(runtime, CHAIN, 3, rule=wrong, processors=WARM) > SEEN


@pytest.mark.parametrize("rule", RULES)
def test_a_bonus_from_the_wrong_row_is_seen(runtime, rule):
    wrong = following_from(lambda scores: scores[[0] * len(scores)])(RULES[rule])
    assert deviation(runtime, CHAIN, 3, rule=wrong) > SEEN


@pytest.mark.parametrize("rule", RULES)
def test_noise_reused_between_rounds_is_seen(runtime, rule):
    wrong = each_round(RULES[rule])
    assert deviation(runtime, CHAIN, 3, rule=wrong, kind=Reusing) > SEEN


@pytest.mark.parametrize("rule", RULES)
def test_a_residual_that_is_not_renormalised_is_seen(runtime, rule, monkeypatch):
    monkeypatch.setattr(verify, "_normalised", lambda left, *, otherwise: left if left.sum() > 0 else otherwise)
    assert deviation(runtime, CANDIDATES, 3, rule=rule) > SEEN


def test_a_block_without_its_weight_is_seen(runtime, monkeypatch):
    """h_i of a stopped block, as if nothing were left to make up for it."""
    monkeypatch.setattr(verify, "_num_accepted", lambda weights, left, sampler: _by_weights(weights, sampler))
    assert deviation(runtime, CHAIN, 3, rule="block") > SEEN


def _by_weights(weights, sampler):
    return next((i for i in range(len(weights) - 1, 0, -1) if sampler.coin(weights[i])), 0)
