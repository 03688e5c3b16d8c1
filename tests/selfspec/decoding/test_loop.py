"""The conformance suite: every drafter through the one loop."""

from __future__ import annotations

import pytest
import torch
from breaking import Breaking
from heads import random_head
from models import plain, run, small
from stores import babble, stored
from toys import Adding, HiddenHead, RandomTree, Scripted, Staged, always_wrong, oracle
from trained import learnt
from transformers import SuppressTokensLogitsProcessor
from words import Doubled

from selfspec.basics.errors import BusyError
from selfspec.controllers import AdaptiveThreshold, FixedK, RateOptimal, StaticThreshold
from selfspec.decoding.loop import decode
from selfspec.drafters import (
    ClaspDrafter,
    FreeDrafter,
    Guard,
    InputDrafter,
    JacobiDrafter,
    LayerSkipDrafter,
    LookaheadDrafter,
    MergedDrafter,
    ModelDrafter,
    PlainDrafter,
    RecycleDrafter,
    Route,
    Router,
    SwiftDrafter,
    TranslatedDrafter,
)
from selfspec.drafters.heads import HeadBelow, HeadDrafter
from selfspec.facts.acceptance import Outlook
from selfspec.facts.confidence import Confidence
from selfspec.facts.draft_path import DraftPath
from selfspec.facts.skip import SkipSet
from selfspec.model.low_precision import fake
from selfspec.proposers.ahead import Ahead
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.forward import Runtime
from selfspec.speculation.rules import find_rule, greedy
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

VOCABULARY = 11
PROMPTS = [[1, 4, 2, 9], [7], [3, 3, 3, 0, 5, 10, 8], [6, 2]]
WORDS = tuple(range(10))
SKIP = SkipSet((1,), (0, 2))
ENDS = frozenset([2, 8])
LOW = DraftPath(SkipSet((1,), (0,)), int8=SkipSet((0, 2), (1, 2)), head="int8")
TRAINED = DraftPath(SkipSet((1,), (1,)), int8=SkipSet((0, 2), (0, 2)), head="int8")
BY_GAP = Confidence(bias=0.2, probability=0.4, gap=0.8)
GUESSES = Ahead([Lookup(), Adding(VOCABULARY, 0.3)], (1.0, 1.1, 1.15, 1.2))
DRAFT_MODEL = Runtime(small(VOCABULARY, 1, seed=3), kernel=fake)
STORED = stored(babble(VOCABULARY), VOCABULARY)
DRAFTERS = {
    "plain": lambda runtime, prompt: PlainDrafter(),
    "random tree": lambda runtime, prompt: RandomTree(VOCABULARY, (3, 2, 1)),
    "hidden head": lambda runtime, prompt: HiddenHead(runtime),
    "draft model": lambda runtime, prompt: ModelDrafter(runtime, DRAFT_MODEL, StaticThreshold(0.2, 4), candidates=2),
    "draft model, in 8 bits, with guesses": lambda runtime, prompt: ModelDrafter(
        runtime, DRAFT_MODEL, FixedK(3), path=DraftPath.of(["int8"] * 2, head="int8"), ahead=GUESSES
    ),
    "staged": lambda runtime, prompt: Staged(Runtime(small(VOCABULARY, 2, seed=3)), RandomTree(VOCABULARY, (2, 1))),
    "same model": lambda runtime, prompt: ModelDrafter(runtime, runtime, FixedK(3)),
    "always wrong": lambda runtime, prompt: always_wrong(prompt, plain(runtime, prompt, 20), VOCABULARY),
    "always right": lambda runtime, prompt: oracle(prompt, plain(runtime, prompt, 20)),
    "layer skip, fixed": lambda runtime, prompt: LayerSkipDrafter(runtime, SKIP, FixedK(3)),
    "layer skip, static": lambda runtime, prompt: LayerSkipDrafter(runtime, SKIP, StaticThreshold(0.3, 5)),
    "layer skip, candidates": lambda runtime, prompt: LayerSkipDrafter(
        runtime, SKIP, StaticThreshold(0.3, 4), candidates=3
    ),
    "layer skip, draft vocabulary": lambda runtime, prompt: LayerSkipDrafter(
        runtime, DraftPath(SKIP, (1, 2, 4, 5, 8, 9)), FixedK(3)
    ),
    "layer skip, rate": lambda runtime, prompt: LayerSkipDrafter(
        runtime, SKIP, RateOptimal(floor=0.1, outlook=Outlook(0.2)), candidates=4
    ),
    "few bits": lambda runtime, prompt: LayerSkipDrafter(runtime, LOW, AdaptiveThreshold(k_max=6), confidence=BY_GAP),
    "few bits, candidates": lambda runtime, prompt: LayerSkipDrafter(
        runtime, LOW, RateOptimal(floor=0.1, outlook=Outlook(0.2)), candidates=4, confidence=BY_GAP
    ),
    "trained path": lambda runtime, prompt: LayerSkipDrafter(
        runtime, learnt(runtime, TRAINED), StaticThreshold(0.2, 5), candidates=2
    ),
    "guarded": lambda runtime, prompt: Guard(LayerSkipDrafter(runtime, SKIP, FixedK(3), candidates=2)),
    "layer skip, adaptive": lambda runtime, prompt: LayerSkipDrafter(runtime, SKIP, AdaptiveThreshold(k_max=6)),
    "guesses": lambda runtime, prompt: LayerSkipDrafter(runtime, SKIP, AdaptiveThreshold(k_max=6), ahead=GUESSES),
    "guesses, candidates": lambda runtime, prompt: LayerSkipDrafter(
        runtime, LOW, StaticThreshold(0.3, 4), candidates=3, confidence=BY_GAP, ahead=GUESSES
    ),
    "lookup": lambda runtime, prompt: FreeDrafter([Lookup()], StaticThreshold(0.1, 5)),
    "recycle": lambda runtime, prompt: RecycleDrafter(StaticThreshold(0.1, 5), candidates=3),
    "input": lambda runtime, prompt: InputDrafter(StaticThreshold(0.1, 5)),
    "jacobi": lambda runtime, prompt: JacobiDrafter("jacobi", start="padding"),
    "jacobi in blocks": lambda runtime, prompt: JacobiDrafter("gauss-seidel", block=4),
    "jacobi, hybrid": lambda runtime, prompt: JacobiDrafter("hybrid", block=3, parallel=7, start="prompt"),
    "draft model of other tokens": lambda runtime, prompt: TranslatedDrafter(
        runtime, Runtime(small(2 * VOCABULARY, 1, seed=9)), Doubled(VOCABULARY), FixedK(2), candidates=2
    ),
    "draft model of other tokens, with guesses": lambda runtime, prompt: TranslatedDrafter(
        runtime, Runtime(small(2 * VOCABULARY, 1, seed=9)), Doubled(VOCABULARY), FixedK(4), ahead=GUESSES
    ),
    "swift": lambda runtime, prompt: SwiftDrafter(runtime, StaticThreshold(0.1, 4), window=6, every=1, candidates=2),
    "clasp": lambda runtime, prompt: ClaspDrafter(runtime, FixedK(3), skip=2, every=1),
    "lookahead": lambda runtime, prompt: LookaheadDrafter(window=3, ngram=3, guesses=2),
    "merged": lambda runtime, prompt: MergedDrafter(
        [
            FreeDrafter([Lookup()], StaticThreshold(0.1, 5)),
            LayerSkipDrafter(runtime, LOW, RateOptimal(floor=0.1, outlook=Outlook(0.2)), candidates=3),
            HeadDrafter(random_head(runtime, WORDS), FixedK(2), candidates=2),
        ]
    ),
    "merged, of two paths and trees": lambda runtime, prompt: MergedDrafter(
        [
            LayerSkipDrafter(runtime, SKIP, FixedK(3)),
            MergedDrafter([RandomTree(VOCABULARY, (2, 1)), RecycleDrafter(StaticThreshold(0.1, 5), candidates=3)]),
            LayerSkipDrafter(runtime, LOW, StaticThreshold(0.3, 4), candidates=2),
        ]
    ),
    "routes": lambda runtime, prompt: Router(
        [
            Route(LayerSkipDrafter(runtime, SKIP, FixedK(3)), Outlook(0.2)),
            Route(FreeDrafter([Lookup()], StaticThreshold(0.1, 5)), Outlook(0.0)),
        ]
    ),
    "eagle": lambda runtime, prompt: HeadDrafter(random_head(runtime, WORDS), FixedK(4)),
    "eagle, candidates": lambda runtime, prompt: HeadDrafter(
        random_head(runtime, WORDS), StaticThreshold(0.05, 4), candidates=3, ahead=GUESSES
    ),
    "eagle below": lambda runtime, prompt: LayerSkipDrafter(
        runtime, LOW, FixedK(5), ahead=GUESSES, below=HeadBelow(random_head(runtime, WORDS), (1.0,) * 5, 0.01)
    ),
    "medusa": lambda runtime, prompt: HeadDrafter(random_head(runtime, WORDS, "medusa"), FixedK(4), candidates=2),
    "hydra": lambda runtime, prompt: HeadDrafter(random_head(runtime, WORDS, "hydra"), FixedK(3)),
    "mlp": lambda runtime, prompt: HeadDrafter(random_head(runtime, WORDS, "mlp"), FixedK(6)),
    "mtp": lambda runtime, prompt: HeadDrafter(random_head(runtime, WORDS, "mtp"), FixedK(4)),
    "chimera": lambda runtime, prompt: HeadDrafter(random_head(runtime, WORDS, "chimera"), FixedK(4)),
    "mtp below": lambda runtime, prompt: LayerSkipDrafter(
        runtime, LOW, FixedK(5), below=HeadBelow(random_head(runtime, WORDS, "mtp"), (1.0,) * 5, 0.01)
    ),
    "store": lambda runtime, prompt: FreeDrafter([Lookup(), STORED], StaticThreshold(0.1, 5)),
    "guesses from a store": lambda runtime, prompt: LayerSkipDrafter(
        runtime, LOW, StaticThreshold(0.3, 4), candidates=3, confidence=BY_GAP, ahead=Ahead([STORED], (1.0,) * 4)
    ),
}


@pytest.fixture(scope="module")
def runtime():
    return Runtime(small(VOCABULARY, seed=2), kernel=fake)


@pytest.fixture(params=DRAFTERS)
def make(request, runtime):
    """A maker of one kind of drafter."""
    return lambda prompt: DRAFTERS[request.param](runtime, prompt)


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_greedy_tokens_are_plain_decodings(runtime, make, prompt):
    assert run(runtime, make(prompt), prompt, 20)[0] == plain(runtime, prompt, 20)


def test_limits(runtime, make):
    prompt = PROMPTS[0]
    text = plain(runtime, prompt, 12)
    for room in range(1, 13):
        drafter = make(prompt)
        tokens, outcomes = run(runtime, drafter, prompt, room)
        assert tokens == text[:room]
        left = room
        for outcome in outcomes:
            assert outcome.draft.depth <= left - 1
            left -= len(outcome.tokens)
        assert left == 0


def test_end_of_sequence_at_every_place(runtime, make):
    """Whichever token ends the text, nothing is emitted after it, and nothing is drafted below it."""
    prompt = PROMPTS[2]
    text = plain(runtime, prompt, 20)
    for end in range(VOCABULARY):
        ends = frozenset([end])
        expected = text[: text.index(end) + 1] if end in text else text
        tokens, outcomes = run(runtime, make(prompt), prompt, 20, ends=ends)
        assert tokens == expected
        for outcome in outcomes:
            draft = outcome.draft
            assert all(parent < 0 or draft.tokens[parent] not in ends for parent in draft.parents)


@pytest.mark.parametrize("place", range(1, 9))
def test_stop_at_every_place(runtime, make, place):
    prompt = PROMPTS[0]
    text = plain(runtime, prompt, 20)
    seen = []

    def stop(token):
        seen.append(token)
        return len(seen) == place

    assert run(runtime, make(prompt), prompt, 20, stop=stop)[0] == text[:place] == seen


def test_counts_of_begin_and_end(runtime, make):
    drafter = make(PROMPTS[0])
    calls = count(drafter)
    run(runtime, drafter, PROMPTS[0], 8)
    run(runtime, drafter, PROMPTS[0], 8)
    assert calls["begin"] == calls["end"] == 2


def count(drafter):
    calls = {"begin": 0, "end": 0}
    for name in calls:
        inner = getattr(drafter, name)

        def outer(*args, inner=inner, name=name):
            calls[name] += 1
            return inner(*args)

        setattr(drafter, name, outer)
    return calls


class Broken(Exception):
    pass


def test_an_exception_between_any_two_steps_leaves_the_runtime_usable(runtime, make, monkeypatch):
    """Sampled with a seed, where there are more steps than greedily, and the text is plain decoding's too."""
    prompt = PROMPTS[0]

    def decoded(drafter, sampler=None):
        return run(runtime, drafter, prompt, 6, sampler=sampler or Sampler(temperature=1.0, seed=3))

    text = decoded(PlainDrafter())[0]
    drafter = make(prompt)
    calls = count(drafter)
    for fail_at in range(1, 200):
        error = Broken if fail_at % 4 < 2 else KeyboardInterrupt
        breaking = Breaking(error, fail_at)
        calls.update(begin=0, end=0)
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "forward", breaking.wrap(runtime.forward))
            for name in ("begin", "propose", "observe"):
                patch.setattr(drafter, name, breaking.wrap(getattr(drafter, name)))
            patch.setattr(runtime.cache, "commit", breaking.wrap(runtime.cache.commit))
            sampler = Sampler(temperature=1.0, seed=3)
            for name in ("scores", "draw", "draws"):
                patch.setattr(sampler, name, breaking.wrap(getattr(sampler, name)))
            try:
                decoded(drafter, sampler)
                finished = True
            except error:
                finished = False
        assert calls["begin"] == calls["end"] or (calls["begin"] == 0 and calls["end"] <= 1)
        assert decoded(drafter)[0] == text  # as every drafter does after any of them
        if finished:
            return
    pytest.fail("never finished")


def test_interruption_after_any_round_leaves_the_runtime_usable(runtime, make):
    prompt = PROMPTS[2]
    text = plain(runtime, prompt, 12)
    for rounds in range(12):
        drafter = make(prompt)
        seq = SequenceState(list(prompt), 12, Sampler())
        loop = decode(runtime, drafter, seq, rule=greedy)
        for _ in zip(range(rounds), loop, strict=False):
            pass
        loop.close()
        emitted = seq.tokens[len(prompt) :]
        assert emitted == text[: len(emitted)]
        assert run(runtime, drafter, prompt, 12)[0] == text


def test_a_second_stream_is_refused_and_the_first_goes_on(runtime, make):
    prompt = PROMPTS[0]
    text = plain(runtime, prompt, 12)
    drafter = make(prompt)
    seq = SequenceState(list(prompt), 12, Sampler())
    first = decode(runtime, drafter, seq, rule=greedy)
    next(first)
    with pytest.raises(BusyError, match="still generating"):
        run(runtime, PlainDrafter(), prompt, 3)
    list(first)
    assert seq.tokens[len(prompt) :] == text


@pytest.mark.parametrize("rule", ["match", "block", "token"])
def test_a_seed_repeats_and_seeds_differ(runtime, make, rule):
    def sample(seed, drafter=None):
        sampler = Sampler(temperature=1.5, seed=seed, tied=rule == "match")
        return run(runtime, drafter or make(PROMPTS[0]), PROMPTS[0], 24, sampler=sampler, rule=rule)[0]

    assert sample(5) == sample(5)
    assert len({tuple(sample(seed)) for seed in range(4)}) > 1
    if rule == "match":
        assert sample(5) == sample(5, PlainDrafter())


@pytest.mark.parametrize("rule", ["match", "block", "token"])
def test_sampled_texts_end_where_they_should(runtime, make, rule):
    """Whatever the rule, nothing comes after an end token, and no more than there is room for."""
    ended = 0
    for seed in range(12):
        sampler = Sampler(temperature=1.5, seed=seed, tied=rule == "match")
        tokens, outcomes = run(runtime, make(PROMPTS[0]), PROMPTS[0], 15, sampler=sampler, rule=rule, ends=ENDS)
        assert ENDS.isdisjoint(tokens[:-1])
        assert tokens[-1] in ENDS or len(tokens) == 15
        assert [t for outcome in outcomes for t in outcome.tokens] == tokens
        ended += tokens[-1] in ENDS
    assert ended > 0


def test_the_first_round_can_be_plain(runtime, make):
    prompt = PROMPTS[0]
    tokens, outcomes = run(runtime, make(prompt), prompt, 10, first_plain=True)
    assert len(outcomes[0].draft) == 0
    assert tokens == plain(runtime, prompt, 10)


def test_the_exact_pattern_of_a_perfect_draft(runtime):
    """Draft = target and k = 2: every round emits [draft, draft, target]."""
    drafter = LayerSkipDrafter(runtime, SkipSet(), FixedK(2))
    _, outcomes = run(runtime, drafter, PROMPTS[0], 9)
    assert [(len(o.draft), len(o.path), len(o.tokens)) for o in outcomes] == [(2, 2, 3)] * 3
    assert len(run(runtime, drafter, PROMPTS[0], 10)[1]) == 4  # one more token: a round without room to draft


def test_the_exact_pattern_of_a_draft_that_is_never_right(runtime):
    drafter = DRAFTERS["always wrong"](runtime, PROMPTS[0])
    _, outcomes = run(runtime, drafter, PROMPTS[0], 5)
    assert [(len(o.draft), len(o.path), len(o.tokens)) for o in outcomes] == [
        (3, 0, 1),
        (3, 0, 1),
        (2, 0, 1),
        (1, 0, 1),
        (0, 0, 1),
    ]


def test_a_runtime_without_trees_verifies_the_backbone(runtime, monkeypatch):
    prompt = PROMPTS[0]
    monkeypatch.setattr(runtime, "trees", False)
    tokens, outcomes = run(runtime, RandomTree(VOCABULARY, (3, 2, 1)), prompt, 12)
    assert tokens == plain(runtime, prompt, 12)
    assert all(outcome.draft.is_chain for outcome in outcomes)
    assert outcomes[0].draft.depth == 3


def test_outcomes_carry_the_rows_of_rejected_tokens(runtime):
    drafter = HiddenHead(runtime)
    _, outcomes = run(runtime, drafter, PROMPTS[0], 6)
    for outcome in outcomes:
        rows = 1 + len(outcome.draft)
        assert outcome.step.logits.shape == (1, rows, VOCABULARY)
        assert outcome.step.hidden[runtime.layers].shape[1] == rows


def test_the_cache_ends_as_if_all_had_been_decoded_plainly(runtime):
    """After any drafter, the committed keys are those of a full pass over the text."""
    for name in ("random tree", "layer skip, adaptive"):
        prompt = PROMPTS[0]
        tokens, _ = run(runtime, DRAFTERS[name](runtime, prompt), prompt, 12)
        length = runtime.cache.length[0]
        assert length == len(prompt) + 12 - 1
        kept = [keys[:, :, :length].clone() for keys in runtime.cache.keys]
        with runtime.session(length):
            runtime.forward(torch.tensor([[*prompt, *tokens[:-1]]]), 0, logits=None)
            for mine, keys in zip(kept, runtime.cache.keys, strict=True):
                torch.testing.assert_close(mine, keys[:, :, :length], atol=1e-10, rtol=1e-10)


def test_rules_are_looked_up_by_the_sampler(runtime):
    sampler = Sampler(temperature=1.0, seed=1)
    seq = SequenceState(list(PROMPTS[0]), 6, sampler)
    drafter = Scripted(lambda tokens: [1, 2])
    assert sum(len(o.tokens) for o in decode(runtime, drafter, seq, rule=find_rule(None, sampler))) == 6


def test_a_draft_vocabulary_of_which_no_token_is_possible_drafts_nothing(runtime):
    only = [1, 3]
    sampler = Sampler(processors=[SuppressTokensLogitsProcessor(only)])
    drafter = LayerSkipDrafter(runtime, DraftPath(SKIP, tuple(only)), FixedK(3))
    tokens, outcomes = run(runtime, drafter, PROMPTS[0], 12, sampler=sampler)
    assert tokens == run(runtime, PlainDrafter(), PROMPTS[0], 12, sampler=sampler)[0]
    assert not any(len(outcome.draft) for outcome in outcomes)


def test_nothing_else_is_drafted_than_the_draft_vocabulary(runtime):
    only = [1, 3, 9]
    drafter = LayerSkipDrafter(runtime, DraftPath(SKIP, tuple(only)), FixedK(3))
    for sampler in (Sampler(), Sampler(temperature=1.0)):
        _, outcomes = run(runtime, drafter, PROMPTS[0], 12, sampler=sampler)
        assert {token for outcome in outcomes for token in outcome.draft.tokens} <= set(only)
