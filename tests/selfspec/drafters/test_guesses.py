"""Guesses below a draft path: what is drafted stays the path's own, token for token, in fewer passes."""

from __future__ import annotations

import random

import pytest
import torch
from models import plain, run, small
from stores import babble, stored

from selfspec.controllers import BatchDraftScheduler, FixedK
from selfspec.drafters import LayerSkipDrafter
from selfspec.engine.engine import Engine
from selfspec.models.low_precision import fake
from selfspec.proposers.base import Proposal, ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafter import Limit
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.costs import PassCosts
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.draft_work import DRAFT_PATH, draft_pass

VOCABULARY, PROMPTS = 11, [[1, 4, 2, 9], [7], [3, 3, 3, 0, 5, 10, 8], [6, 2]]
PATH = DraftPath(SkipSet((1,), (0,)), int8=SkipSet((0, 2), (1, 2)), head="int8")
SAMPLERS = {
    "greedy": lambda: Sampler(),
    "match": lambda: Sampler(temperature=0.8, seed=3),
    "sampled": lambda: Sampler(temperature=0.8, seed=3, tied=False),
}


class Random:
    """Guesses of a text that are right now and then."""

    name = "some"

    def reader(self):
        return RandomReader()


class RandomReader:
    def __init__(self):
        self.text = []

    def append(self, token):
        self.text.append(token)

    def look_up(self, drafted, most):
        draw = random.Random(repr([*self.text, *drafted]))
        n = draw.randint(0, most)
        return Proposal([draw.randrange(VOCABULARY) for _ in range(n)], [0.9] * n)


class Knowing:
    """Guesses a text that it knows."""

    name = "some"

    def __init__(self, text, chance=1.0):
        self.text, self.chance = text, chance

    def reader(self):
        return KnowingReader(self.text, self.chance)


class KnowingReader:
    def __init__(self, text, chance):
        self.text, self.chance, self.num_read = text, chance, 0

    def append(self, token):
        self.num_read += 1

    def look_up(self, drafted, most):
        at = self.num_read + len(drafted)
        tokens = self.text[at : at + most]
        return Proposal(tokens, [self.chance] * len(tokens))


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(VOCABULARY, seed=2), kernel=fake)


def drafted(runtime, ahead, prompt, sampler, *, candidates=1):
    drafter = LayerSkipDrafter(runtime, PATH, FixedK(5), candidates=candidates, proposer_chain=ahead)
    tokens, outcomes = run(runtime, drafter, prompt, 24, sampler=sampler)
    return tokens, [outcome.draft for outcome in outcomes]


@pytest.mark.parametrize("candidates", [1, 3])
@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(
    "proposer", [Random(), Lookup(), stored(babble(VOCABULARY), VOCABULARY)], ids=["random", "lookup", "store"]
)
def test_drafts_are_the_paths_own(runtime, proposer, kind, candidates):
    """Tokens, what they were drawn from and how sure the draft was, whatever was guessed."""
    spared = 0
    for prompt in PROMPTS:
        mine, theirs = (
            drafted(runtime, ahead, prompt, SAMPLERS[kind](), candidates=candidates)
            for ahead in (ProposerChain([proposer], (1.0, 1.0, 1.0, 1.0)), None)
        )
        assert mine[0] == theirs[0]
        for a, b in zip(mine[1], theirs[1], strict=True):
            assert (a.tokens, a.parents, a.q_row) == (b.tokens, b.parents, b.q_row)
            assert a.confidence == pytest.approx(b.confidence, abs=1e-12)
            if a.q is not None:
                torch.testing.assert_close(a.q, b.q, rtol=0, atol=1e-12)
            spared += sum(calls for _, calls in b.work) - sum(calls for _, calls in a.work)
    assert spared > 0


@pytest.mark.parametrize("candidates", [1, 3])
def test_each_token_is_told_from_what_came_up_with_it(runtime, candidates):
    """Of a pass the first tokens as far as they were guessed, the proposer; every other the draft path."""
    ahead = ProposerChain([Random()], (1.0, 1.0, 1.0, 1.0))
    found = set()
    for prompt in PROMPTS:
        for draft in drafted(runtime, ahead, prompt, Sampler(), candidates=candidates)[1]:
            chain = len(draft.confidence)
            assert set(draft.sources[chain:]) <= {DRAFT_PATH}
            passes = sum(calls for _, calls in draft.work)
            predicted = draft.sources[:chain].count("some")
            assert chain - passes <= predicted <= chain
            found.update(draft.sources)
    assert found == {DRAFT_PATH, "some"}
    alone = drafted(runtime, None, PROMPTS[0], Sampler())[1]
    assert {source for draft in alone for source in draft.sources} == {DRAFT_PATH}


def test_right_guesses_leave_one_pass(runtime):
    prompt = PROMPTS[0]
    text = plain(runtime, prompt, 24)
    drafter = LayerSkipDrafter(
        runtime, SkipSet(), FixedK(4), proposer_chain=ProposerChain([Knowing([*prompt, *text])], (1.0,) * 4)
    )
    tokens, outcomes = run(runtime, drafter, prompt, 22)
    assert tokens == text[:22]
    assert {outcome.draft.work for outcome in outcomes[1:-1]} == {((draft_pass(4), 1),)}


@pytest.mark.parametrize(("sequences", "width"), [(1, 4), (2, 4), (3, 1)])
def test_only_passes_of_small_batches_check_lookup_tokens(sequences, width):
    """A wider pass is nearly free for one sequence, and not for many."""
    runtime = LeanRuntime(small(VOCABULARY), kernel=fake, rows=sequences)
    prompt = PROMPTS[0]
    proposer = Knowing([*prompt, *plain(runtime, prompt, 24)], 0.2)  # too unlikely to be verified in place of drafts
    drafter = LayerSkipDrafter(runtime, SkipSet(), FixedK(4), proposer_chain=ProposerChain([proposer], (1.0,) * 4))
    free = (0.0, 1.0, *[1.0 + n / 1e6 for n in range(1, 64)])
    drafter.load = BatchDraftScheduler(PassCosts(free, tuple(second / 10 for second in free)))
    widths = set()
    with Engine(runtime, drafter) as engine:
        for _ in range(sequences):
            engine.join(SequenceState(list(prompt), 8, Sampler()))
        while engine.running:
            drafter.load.begin(sequences)
            outcomes = [outcome for _, outcome in engine.step()]
            if len(outcomes) == sequences:
                widths |= {part.rows for outcome in outcomes for part, _ in outcome.draft.work}
    assert max(widths) == width


@pytest.mark.parametrize(("sequences", "candidates"), [(2, 3), (3, 1)])
def test_only_drafts_of_small_batches_have_further_candidates(sequences, candidates):
    runtime = LeanRuntime(small(VOCABULARY), kernel=fake, rows=sequences)
    drafter = LayerSkipDrafter(runtime, PATH, FixedK(2), candidates=3)
    free = (0.0, *[1.0] * 64)
    drafter.load = BatchDraftScheduler(PassCosts(free, tuple(second / 10 for second in free)))
    widths = set()
    with Engine(runtime, drafter) as engine:
        for prompt in PROMPTS[:sequences]:
            engine.join(SequenceState(list(prompt), 8, Sampler()))
        while engine.running:
            drafter.load.begin(sequences)
            outcomes = [outcome for _, outcome in engine.step()]
            if len(outcomes) == sequences and all(o.draft.depth for o in outcomes):
                widths |= {len(o.draft) / o.draft.depth for o in outcomes}
    assert max(widths) == candidates


def test_the_dearest_work_is_never_exceeded(runtime):
    drafter = LayerSkipDrafter(runtime, PATH, FixedK(6), proposer_chain=ProposerChain([Random()], (1.0, 1.1, 1.2)))
    for depth in range(1, 7):
        limit = Limit(depth)
        max_work = drafter.max_work(limit)
        assert sum(calls for _, calls in max_work) == depth
        assert max(part.rows for part, _ in max_work) == min(3, depth)
    for draft in drafted(runtime, drafter.proposer_chain, PROMPTS[2], Sampler())[1]:
        assert sum(calls for _, calls in draft.work) <= len(draft)
        assert max((part.rows for part, _ in draft.work), default=1) <= 3
