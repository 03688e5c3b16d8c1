"""Engines that reuse what the cache holds: each sequence gives what it gives alone, and only what is new is read."""

from __future__ import annotations

import random

import pytest
import torch
from breaking import Breaking
from families import FAMILY_CONFIGS
from models import plain, run, small, tiny
from taken_over import decoded
from toys import HiddenHead, Lockstep, RandomTree

from selfspec.controllers import FixedK, StaticThreshold
from selfspec.drafters import Guard, LayerSkipDrafter, ModelDrafter, PlainDrafter
from selfspec.engine.engine import Engine, decode
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import DraftPath, SkipSet

VOCABULARY = 11
SKIP = SkipSet((1,), (0, 2))
LOW = DraftPath(SkipSet((1,), (0,)), int8=SkipSet((0, 2), (1, 2)), head="int8")
ENDS = frozenset([2, 8])
READING = {  # those that need no streams of the prompt
    "plain": lambda runtime: PlainDrafter(),
    "random tree": lambda runtime: RandomTree(VOCABULARY, (3, 2, 1)),
    "draft model": lambda runtime: ModelDrafter(runtime, LeanRuntime(small(VOCABULARY, 1, seed=3)), FixedK(3)),
    "lockstep": Lockstep,
    "layer skip": lambda runtime: LayerSkipDrafter(runtime, SKIP, FixedK(3)),
    "candidates": lambda runtime: LayerSkipDrafter(runtime, SKIP, StaticThreshold(0.3, 4), candidates=3),
    "few bits": lambda runtime: LayerSkipDrafter(runtime, LOW, FixedK(3)),
    "guarded": lambda runtime: Guard(LayerSkipDrafter(runtime, SKIP, FixedK(3), candidates=2)),
}


class Broken(BaseException):
    """As Ctrl-C is, no `Exception`."""


def model():
    made = small(VOCABULARY, seed=2)
    made.config.max_position_embeddings = 1024
    return made


@pytest.fixture
def runtime():
    return LeanRuntime(model())


@pytest.fixture(scope="module")
def alone():
    return LeanRuntime(model())


@pytest.fixture(params=READING)
def make(request):
    return READING[request.param]


def prefilled(runtime, monkeypatch):
    """The number of tokens in each pass over a prompt, as they come."""
    forward, read = runtime.forward, []

    def counting(tokens, *rest, **options):
        if options.get("logits", "all") != "all":
            read.append(tokens.numel())
        return forward(tokens, *rest, **options)

    monkeypatch.setattr(runtime, "forward", counting)
    return read


def check_what_it_knows(runtime, alone):
    """The keys and values of all that the cache says it knows are those of a fresh pass over the same tokens."""
    cache = runtime.cache
    for row in range(runtime.rows):
        known = list(cache.known(row))
        if known:
            with alone.session(len(known)):
                alone.forward(torch.tensor([known]), 0, logits=None)
                for mine, theirs in ((cache.keys, alone.cache.keys), (cache.values, alone.cache.values)):
                    for layer, expected in zip(mine, theirs, strict=True):
                        torch.testing.assert_close(layer[row, :, : len(known)], expected[0, :, : len(known)])


def said(tokens, draw):
    """What comes next in a chat: what was said (or only its beginning, or something else), and a few tokens more."""
    kept = draw.choice([len(tokens), len(tokens), len(tokens) - 1, draw.randrange(len(tokens) + 1), 0])
    return [*tokens[: max(0, kept)], *(draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 25)))]


@pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "match"])
def test_each_gives_what_it_gives_alone(runtime, alone, make, temperature):
    """Turn by turn, ended by a token, by the reader or by its length, and now and then by a plain engine in between."""
    draw, drafter, tokens, kept = random.Random(1), make(runtime), [], 0
    for turn in range(24):
        prompt, room = said(tokens, draw), draw.randrange(1, 14)
        ends = ENDS if draw.random() < 0.5 else frozenset()
        stop = draw.choice([None, 4])
        options = {"ends": ends, "stop": None if stop is None else lambda token, stop=stop: token == stop}
        sampler = [Sampler(temperature=temperature, seed=turn) if temperature else Sampler() for _ in range(2)]
        expected = run(alone, PlainDrafter(), prompt, room, sampler=sampler[0], **options)[0]
        seq = SequenceState(list(prompt), room, sampler[1], ends)
        for _ in decode(runtime, drafter, seq, stop=options["stop"], reuse=True):
            pass
        assert seq.tokens == [*prompt, *expected]
        assert turn or seq.num_cached == 0
        kept += seq.num_cached
        check_what_it_knows(runtime, alone)
        tokens = seq.tokens
        if draw.random() < 0.2:
            plain(runtime, [1, 2, 3], 5)
            assert runtime.cache.known(0) == ()
    assert kept > 150


def test_only_what_is_new_is_read(runtime, make, monkeypatch):
    """All that was emitted is kept but the last token, whose keys no pass has written, unless it was drafted."""
    read, drafter = prefilled(runtime, monkeypatch), make(runtime)
    first = SequenceState([1, 4, 2, 9, 7, 7, 3], 8, Sampler())
    list(decode(runtime, drafter, first, reuse=True))
    second = SequenceState([*first.tokens, 5, 0, 6], 8, Sampler())
    list(decode(runtime, drafter, second, reuse=True))
    assert second.num_cached in (len(first.tokens) - 1, len(first.tokens))
    assert read == [7, len(second.tokens) - 8 - second.num_cached]


def test_of_the_same_prompt_again_the_last_token_alone_is_read(runtime, monkeypatch):
    read, prompt = prefilled(runtime, monkeypatch), [1, 4, 2, 9]
    seqs = [SequenceState(list(prompt), 6, Sampler()) for _ in range(2)]
    for seq in seqs:
        list(decode(runtime, PlainDrafter(), seq, reuse=True))
    assert read == [4, 1]
    assert [seq.num_cached for seq in seqs] == [0, 3]
    assert seqs[0].tokens == seqs[1].tokens


def test_a_drafter_that_reads_the_prompts_streams_has_all_of_it_read(runtime, alone, monkeypatch):
    read, prompt = prefilled(runtime, monkeypatch), [1, 4, 2, 9]
    first = SequenceState(list(prompt), 6, Sampler())
    list(decode(runtime, PlainDrafter(), first, reuse=True))
    for drafter in (HiddenHead(runtime), Guard(HiddenHead(runtime))):
        second = SequenceState([*first.tokens, 5, 0], 6, Sampler())
        list(decode(runtime, drafter, second, reuse=True))
        assert second.tokens[-6:] == plain(alone, [*first.tokens, 5, 0], 6)
    assert read == [4, len(first.tokens) + 2, len(first.tokens) + 2]


def test_one_that_reads_hidden_states_leaves_nothing_of_the_text_before_it(runtime, alone):
    """Its keys and values are in the row where those of an earlier text were."""
    head, start = HiddenHead(runtime), [1, 4, 2, 9, 7, 7, 3, 5]
    for drafter, prompt in ((PlainDrafter(), [*start, 8]), (head, [6, *start]), (PlainDrafter(), [*start, 3])):
        seq = SequenceState(list(prompt), 8, Sampler())
        list(decode(runtime, drafter, seq, reuse=True))
        assert seq.tokens[len(prompt) :] == plain(alone, prompt, 8)
        check_what_it_knows(runtime, alone)


def test_others_forget_what_was_held_and_leave_nothing(runtime, monkeypatch):
    read, prompt = prefilled(runtime, monkeypatch), [1, 4, 2, 9]
    list(decode(runtime, PlainDrafter(), SequenceState(list(prompt), 6, Sampler()), reuse=True))
    plain(runtime, prompt, 6)
    list(decode(runtime, PlainDrafter(), SequenceState(list(prompt), 6, Sampler()), reuse=True))
    with runtime.session(8):
        pass
    list(decode(runtime, PlainDrafter(), SequenceState(list(prompt), 6, Sampler()), reuse=True))
    assert read == [4, 4, 4, 4]


def test_a_cache_that_grows_keeps_what_it_held(runtime, alone, monkeypatch):
    """A second message that is longer than the cache was, and a third that goes on from there."""
    read, drafter = prefilled(runtime, monkeypatch), LayerSkipDrafter(runtime, SKIP, FixedK(3))
    tokens = [1, 4, 2, 9]
    for more in ([], [i % VOCABULARY for i in range(300)], [3, 1]):
        slots, before = runtime.cache.slots, len(tokens)
        seq = SequenceState([*tokens, *more], 9, Sampler())
        list(decode(runtime, drafter, seq, reuse=True))
        assert seq.tokens[-9:] == plain(alone, [*tokens, *more], 9)
        assert (runtime.cache.slots > slots) == (len(more) != 2)
        assert read[-1] <= len(more) + (before if not more else 1)
        check_what_it_knows(runtime, alone)
        tokens = seq.tokens
    assert len(read) == 3


def test_broken_off_between_any_two_steps(alone, make, monkeypatch):
    """Wherever an answer is broken off, what the cache says it knows is right, and so is the next answer."""
    kept = []
    for fail_at in range(1, 90):
        breaking, runtime = Breaking(Broken, fail_at), LeanRuntime(alone.model)
        drafter, first = make(runtime), SequenceState([1, 4, 2, 9, 5], 10, Sampler())
        broken = False
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "forward", breaking.wrap(runtime.forward))
            for name in ("begin", "propose", "observe"):
                patch.setattr(drafter, name, breaking.wrap(getattr(drafter, name)))
            patch.setattr(first, "stop", breaking.wrap(lambda token: False)) if fail_at % 3 == 0 else None
            commit = breaking.wrap(type(runtime.cache).commit)
            patch.setattr(type(runtime.cache), "commit", lambda *given, commit=commit: commit(*given))
            try:
                list(decode(runtime, drafter, first, reuse=True))
            except Broken:
                broken = True
        check_what_it_knows(runtime, alone)
        second = SequenceState([*first.tokens, 0, 7], 7, Sampler())
        list(decode(runtime, drafter, second, reuse=True))
        assert second.tokens[-7:] == plain(alone, [*first.tokens, 0, 7], 7)
        kept.append(second.num_cached)
        if not broken:
            break
    else:
        pytest.fail("never finished")
    assert 0 in kept
    assert max(kept) > 12


def test_two_rows(alone, make, monkeypatch):
    """Two chats side by side each find their own row, whoever comes first; a third takes the one that loses least."""
    runtime = LeanRuntime(alone.model, rows=2)
    read, drafter = prefilled(runtime, monkeypatch), make(runtime)
    chats = [[1, 4, 2, 9, 1, 1, 0], [1, 4, 7]]
    for order in ((0, 1), (1, 0), (0, 1)):
        seqs = {}
        with Engine(runtime, drafter, reuse=True) as engine:
            for number in order:
                seqs[number] = SequenceState(list(chats[number]), 6 + number, Sampler())
                engine.join(seqs[number])
                engine.step()
            while engine.running:
                engine.step()
        for number, seq in seqs.items():
            assert seq.tokens == [*chats[number], *plain(alone, chats[number], 6 + number)]
            chats[number] = [*seq.tokens, 3, 10]
        check_what_it_knows(runtime, alone)
    assert read[:2] == [7, 3]
    assert max(read[2:]) <= 4
    third = SequenceState([1, 4, 5, 5], 3, Sampler())
    longer = max((0, 1), key=lambda row: len(runtime.cache.known(row)))
    list(decode(runtime, PlainDrafter(), third, reuse=True))
    assert third.row != longer
    slots, fourth = runtime.cache.slots, SequenceState([*third.tokens, *[3] * 300], 3, Sampler())
    list(decode(runtime, PlainDrafter(), fourth, reuse=True))
    assert runtime.cache.slots > slots
    check_what_it_knows(runtime, alone)
    assert len(runtime.cache.known(longer)) > 15  # the other row's, though the cache has grown


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "cohere2", "gpt_oss"])
def test_a_prefix_copied_to_where_nodes_were_rejected_is_hidden_by_the_window_alone(family):
    """A short text leaves the places of its rejected nodes in its row; the next one there begins as another does."""
    for seed in range(4):
        seqs, expected = decoded(LeanRuntime(tiny(FAMILY_CONFIGS[family], seed=seed)), seed, vocabulary=61)
        assert (seqs[2].row, seqs[2].num_cached) == (seqs[1].row, len(seqs[0].tokens) - 40 - 1)
        assert [seq.tokens for seq in seqs] == expected
