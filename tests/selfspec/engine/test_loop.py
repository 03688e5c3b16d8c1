"""The conformance suite: every drafter through the one loop."""

from __future__ import annotations

import pytest
import torch
from amount import whole
from breaking import Breaking
from every_drafter import REPRESENTATIVES, table
from models import plain, run, small
from toys import HiddenHead, RandomTree, Scripted, always_wrong, oracle
from transformers import SuppressTokensLogitsProcessor

from selfspec.basics.errors import BusyError
from selfspec.controllers import FixedK
from selfspec.drafters import (
    LayerSkipDrafter,
    PlainDrafter,
)
from selfspec.engine import engine
from selfspec.engine.engine import decode
from selfspec.models.low_precision import fake
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafter import DelegatingDrafter, Limit
from selfspec.speculation.rules import find_rule, greedy
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.draft_work import LOOKUP_WORK

VOCABULARY = 11
PROMPTS = [[1, 4, 2, 9], [7], [3, 3, 3, 0, 5, 10, 8], [6, 2]]
SKIP = SkipSet((1,), (0, 2))
ENDS = frozenset([2, 8])
TABLE = table(VOCABULARY)
DRAFTERS = {
    **{name: lambda runtime, prompt, make=make: make(runtime) for name, make in TABLE.items()},
    "always wrong": lambda runtime, prompt: always_wrong(prompt, plain(runtime, prompt, 20), VOCABULARY),
    "always right": lambda runtime, prompt: oracle(prompt, plain(runtime, prompt, 20)),
}


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(VOCABULARY, seed=2), kernel=fake)


@pytest.fixture(params=DRAFTERS)
def make(request, runtime):
    """A maker of one kind of drafter."""
    return lambda prompt: DRAFTERS[request.param](runtime, prompt)


# What follows is the loop's own, and drafters only run through it: in `make test` some stand for all.
by_representatives = pytest.mark.parametrize("make", list(DRAFTERS) if whole() else REPRESENTATIVES, indirect=True)


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_greedy_tokens_are_plain_decodings(runtime, make, prompt):
    assert run(runtime, make(prompt), prompt, 20)[0] == plain(runtime, prompt, 20)


@pytest.mark.parametrize("name", TABLE)
def test_the_last_token_needs_no_position(runtime, name):
    """A context of n positions holds a prompt of n tokens and a new one, and every split of n + 1 tokens."""
    context = runtime.skeleton.context
    prompt = [*(PROMPTS[2] * context)[: context - 9]]
    text = plain(runtime, prompt, 10)
    assert len(text) == 10
    for n in (context, context - 1, context - 9):
        ids = [*prompt, *text][:n]
        expected = [*prompt, *text][n : context + 1]
        assert run(runtime, TABLE[name](runtime), ids, context + 1 - n)[0] == expected


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


class OnlyLookedUp(DelegatingDrafter):
    """A drafter that may only look tokens up, if it can."""

    def propose(self, seqs, limits):
        limits = [Limit(0, limit.nodes, min(limit.depth, limit.nodes)) for limit in limits]
        return super().propose(seqs, limits)


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_a_limit_to_lookup_tokens_is_kept(runtime, make, prompt):
    tokens, outcomes = run(runtime, OnlyLookedUp(make(prompt)), prompt, 20)
    assert tokens == plain(runtime, prompt, 20)
    assert all(not len(outcome.draft) or outcome.draft.work == LOOKUP_WORK for outcome in outcomes)


@by_representatives
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


def test_stop_at_every_place(runtime, make):
    prompt = PROMPTS[0]
    text = plain(runtime, prompt, 20)
    for place in range(1, 9):
        seen = []

        def stop(token, seen=seen, place=place):
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


@by_representatives
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


@by_representatives
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


@by_representatives
@pytest.mark.parametrize("rule", ["match", "block", "token"])
def test_a_seed_repeats_and_seeds_differ(runtime, make, rule):
    def sample(seed, drafter=None):
        sampler = Sampler(temperature=1.5, seed=seed, tied=rule == "match")
        return run(runtime, drafter or make(PROMPTS[0]), PROMPTS[0], 24, sampler=sampler, rule=rule)[0]

    assert sample(5) == sample(5)
    assert len({tuple(sample(seed)) for seed in range(4)}) > 1
    if rule == "match":
        assert sample(5) == sample(5, PlainDrafter())


@by_representatives
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


def test_the_first_round_drafts_nothing(runtime, make):
    prompt = PROMPTS[0]
    tokens, outcomes = run(runtime, make(prompt), prompt, 10)
    assert (len(outcomes[0].draft), len(outcomes[0].tokens)) == (0, 1)
    assert tokens == plain(runtime, prompt, 10)


def test_the_exact_pattern_of_a_perfect_draft(runtime):
    """Draft = target and k = 2: every round after the first emits [draft, draft, target]."""
    drafter = LayerSkipDrafter(runtime, SkipSet(), FixedK(2))
    _, outcomes = run(runtime, drafter, PROMPTS[0], 10)
    assert [(len(o.draft), len(o.path), len(o.tokens)) for o in outcomes] == [(0, 0, 1), *[(2, 2, 3)] * 3]
    assert len(run(runtime, drafter, PROMPTS[0], 11)[1]) == 5  # one more token: a round without room to draft


def test_the_exact_pattern_of_a_draft_that_is_never_right(runtime):
    drafter = DRAFTERS["always wrong"](runtime, PROMPTS[0])
    _, outcomes = run(runtime, drafter, PROMPTS[0], 6)
    assert [len(o.draft) for o in outcomes] == [0, 3, 3, 2, 1, 0]
    assert all((len(o.path), len(o.tokens)) == (0, 1) for o in outcomes)


def test_a_runtime_without_trees_verifies_the_backbone(runtime, monkeypatch):
    prompt = PROMPTS[0]
    monkeypatch.setattr(runtime, "trees", False)
    tokens, outcomes = run(runtime, RandomTree(VOCABULARY, (3, 2, 1)), prompt, 12)
    assert tokens == plain(runtime, prompt, 12)
    assert all(outcome.draft.is_chain for outcome in outcomes)
    assert outcomes[1].draft.depth == 3


def test_outcomes_carry_the_rows_of_rejected_tokens(runtime):
    drafter = HiddenHead(runtime)
    _, outcomes = run(runtime, drafter, PROMPTS[0], 6)
    for outcome in outcomes:
        rows = 1 + len(outcome.draft)
        assert outcome.step.logits.shape == (1, rows, VOCABULARY)
        assert outcome.step.hidden[runtime.layers].shape[1] == rows


def test_the_cache_ends_as_if_all_had_been_decoded_plainly(runtime):
    """After any drafter, the committed keys are those of a full pass over the text."""
    for name in ("random tree", "skip, adaptive"):
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
    for sampler in (Sampler(), Sampler(temperature=1.0, seed=1)):
        _, outcomes = run(runtime, drafter, PROMPTS[0], 12, sampler=sampler)
        drafted = [token for outcome in outcomes for token in outcome.draft.tokens]
        assert len(drafted) >= 12
        assert set(drafted) <= set(only)


@pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "match"])
@by_representatives
def test_a_long_prompt_is_read_in_chunks_and_gives_the_same_text(runtime, make, temperature, monkeypatch):
    """Progress is reported before the first chunk and after each chunk, and not for a prompt of one chunk."""
    prompt, sampler, reports = PROMPTS[2], Sampler(temperature=temperature, seed=3 if temperature else None), []
    expected = run(runtime, PlainDrafter(), prompt, 20, sampler=sampler)[0]
    assert (
        run(runtime, make(prompt), prompt, 20, sampler=sampler, on_prefill=lambda *at: reports.append(at))[0]
        == expected
    )
    assert reports == []
    monkeypatch.setattr(engine, "PROMPT_CHUNK", 3)
    assert (
        run(runtime, make(prompt), prompt, 20, sampler=sampler, on_prefill=lambda *at: reports.append(at))[0]
        == expected
    )
    assert reports == [(0, 7), (3, 7), (6, 7), (7, 7)]


def test_a_model_with_a_state_reads_its_prompt_in_one_pass(runtime, monkeypatch):
    """Its later passes may go token by token; what is read is reported before and after."""
    reports = []
    monkeypatch.setattr(engine, "PROMPT_CHUNK", 3)
    monkeypatch.setattr(runtime, "stateful", True)
    run(runtime, PlainDrafter(), PROMPTS[2], 1, on_prefill=lambda *at: reports.append(at))
    assert reports == [(0, 7), (7, 7)]


def test_only_what_is_not_cached_is_read_in_chunks(runtime, monkeypatch):
    monkeypatch.setattr(engine, "PROMPT_CHUNK", 3)
    prompt, reports = PROMPTS[2], []
    expected, _ = run(runtime, PlainDrafter(), prompt, 3, reuse=True)
    longer = [*prompt, *expected, 5, 5, 1]
    tokens, _ = run(runtime, PlainDrafter(), longer, 4, reuse=True, on_prefill=lambda *at: reports.append(at))
    assert tokens == plain(runtime, longer, 4)
    assert reports == [(9, 13), (12, 13), (13, 13)]  # the last token that a sequence emits is not cached
