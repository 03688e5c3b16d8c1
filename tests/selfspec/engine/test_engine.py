"""Sequences that take rounds together: each gives what it gives alone, whoever joins and leaves."""

from __future__ import annotations

import random

import pytest
import torch
from amount import whole
from breaking import Breaking
from every_drafter import REPRESENTATIVES, table
from models import plain, run, small
from toys import Scripted

from selfspec.basics.errors import BusyError, SelfspecError
from selfspec.controllers import AdaptiveThreshold, FixedK
from selfspec.drafters import (
    LayerSkipDrafter,
    PlainDrafter,
)
from selfspec.engine.engine import Engine
from selfspec.models.low_precision import fake
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafts import Draft
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import SkipSet
from selfspec.types.methods import WIDEST_DRAFT

VOCABULARY, ROWS = 11, 4
SKIP = SkipSet((1,), (0, 2))
PROMPTS = [[1, 4, 2, 9], [7], [3, 3, 3, 0, 5, 10, 8], [6, 2], [5, 5, 1], [0, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]
ROOMS = [9, 14, 3, 12, 7, 10]
ENDS = frozenset([2, 8])
DRAFTERS = table(VOCABULARY)


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(VOCABULARY, seed=2), rows=ROWS, kernel=fake)


@pytest.fixture(scope="module")
def alone():
    return LeanRuntime(small(VOCABULARY, seed=2))


@pytest.fixture(params=DRAFTERS)
def make(request):
    return DRAFTERS[request.param]


# What follows is the engine's own, and drafters only run through it: in `make test` some stand for all.
by_representatives = pytest.mark.parametrize("make", list(DRAFTERS) if whole() else REPRESENTATIVES, indirect=True)


def samplers(temperature):
    return [Sampler(temperature=temperature, seed=number) if temperature else Sampler() for number in range(6)]


def expected(alone, temperature):
    """What each prompt gives alone, plainly."""
    return [
        run(alone, PlainDrafter(), prompt, room, sampler=sampler, ends=ENDS)[0]
        for prompt, room, sampler in zip(PROMPTS, ROOMS, samplers(temperature), strict=True)
    ]


def sequences(temperature):
    return [
        SequenceState(list(prompt), room, sampler, ENDS)
        for prompt, room, sampler in zip(PROMPTS, ROOMS, samplers(temperature), strict=True)
    ]


def emitted(seqs):
    return [seq.tokens[len(prompt) :] for seq, prompt in zip(seqs, PROMPTS, strict=True)]


def serve(engine, seqs, draw=None):
    """All sequences, as many at once as there are rows; with `draw`, they join whenever it says so."""
    waiting = list(seqs)
    while waiting or engine.running:
        while waiting and len(engine.running) < engine.runtime.rows:
            if draw is not None and engine.running and draw.random() < 0.5:
                break
            engine.join(waiting.pop(0))
        engine.step()


@pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "match"])
def test_each_gives_what_it_gives_alone(runtime, alone, make, temperature):
    seqs = sequences(temperature)
    with Engine(runtime, make(runtime)) as engine:
        serve(engine, seqs)
    assert emitted(seqs) == expected(alone, temperature)


@by_representatives
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "match"])
def test_whenever_they_join(runtime, alone, make, temperature, seed):
    seqs, draw = sequences(temperature), random.Random(seed)
    draw.shuffle(order := list(seqs))
    with Engine(runtime, make(runtime)) as engine:
        serve(engine, order, draw)
    assert emitted(seqs) == expected(alone, temperature)


@by_representatives
def test_those_that_leave_early_disturb_nobody(runtime, alone, make):
    """Each in turn leaves after two rounds: it has what it had, the others' texts are whole, its row is free again."""
    texts = expected(alone, 0.0)
    for leaving in range(ROWS):
        seqs = sequences(0.0)
        with Engine(runtime, make(runtime)) as engine:
            for seq in seqs[:ROWS]:
                engine.join(seq)
            engine.step()
            engine.step()
            if seqs[leaving].remaining:
                engine.leave(seqs[leaving])
            for seq in seqs[ROWS:]:
                while len(engine.running) == ROWS:
                    engine.step()
                engine.join(seq)
            while engine.running:
                engine.step()
        for number, tokens in enumerate(emitted(seqs)):
            assert tokens == texts[number][: len(tokens)]
            assert number == leaving or tokens == texts[number]


def test_begin_and_end_are_called_once_for_each(runtime, make):
    drafter, calls = make(runtime), []
    for name in ("begin", "end"):
        inner = getattr(drafter, name)
        setattr(
            drafter, name, lambda seq, *rest, inner=inner, name=name: (calls.append((name, seq)), inner(seq, *rest))
        )
    seqs = sequences(0.0)
    with Engine(runtime, drafter) as engine:
        serve(engine, seqs[:ROWS])
        engine.join(seqs[-1])
    for seq in (*seqs[:ROWS], seqs[-1]):
        assert [name for name, of in calls if of is seq] == ["begin", "end"]


class Broken(Exception):
    pass


@by_representatives
def test_an_exception_between_any_two_steps_leaves_the_runtime_usable(runtime, alone, make, monkeypatch):
    """A batch is broken off there; what was emitted stands, and the next batch gives the same texts."""
    texts = expected(alone, 1.3)
    for fail_at in range(1, 120):
        breaking = Breaking(Broken, fail_at)
        drafter, seqs, finished = make(runtime), sequences(1.3), True
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "forward", breaking.wrap(runtime.forward))
            for name in ("begin", "propose", "observe"):
                patch.setattr(drafter, name, breaking.wrap(getattr(drafter, name)))
            patch.setattr(runtime.cache, "commit", breaking.wrap(runtime.cache.commit))
            try:
                with Engine(runtime, drafter) as engine:
                    serve(engine, seqs[:3])
            except Broken:
                finished = False
        for tokens, text in zip(emitted(seqs), texts, strict=True):
            assert tokens == text[: len(tokens)]
        again = sequences(1.3)
        with Engine(runtime, drafter) as engine:
            serve(engine, again if finished else again[:3])
        assert emitted(again)[:3] == texts[:3]
        if finished:
            assert emitted(again) == texts
            return
    pytest.fail("never finished")


def test_what_a_drafter_raises_for_one_sequence_leaves_the_others_where_they_were(runtime, alone):
    """The one that it cannot draft for leaves, and the others go on."""
    texts, bad = expected(alone, 0.0), []

    class Picky(Scripted):
        def draft(self, seq):
            if seq in bad:
                raise Broken
            return super().draft(seq)

    seqs = sequences(0.0)
    with Engine(runtime, Picky(lambda tokens: [1, 2, 3])) as engine:
        for seq in seqs[:ROWS]:
            engine.join(seq)
        engine.step()
        bad.append(seqs[0])
        with pytest.raises(Broken):
            engine.step()
        engine.leave(seqs[0])
        while engine.running:
            engine.step()
    assert emitted(seqs)[1:ROWS] == texts[1:ROWS]


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_the_cache_grows_for_a_longer_sequence_while_others_run(rounds):
    short, long = [1, 4, 2, 9], [i % VOCABULARY for i in range(300)]
    first, second = (SequenceState(list(prompt), 12, Sampler()) for prompt in (short, long))
    model = small(VOCABULARY, seed=2)
    model.config.max_position_embeddings = 512
    runtime, alone = LeanRuntime(model, rows=2), LeanRuntime(model)
    with Engine(runtime, LayerSkipDrafter(runtime, SKIP, FixedK(3))) as engine:
        engine.join(first)
        for _ in range(rounds):
            engine.step()
        slots = runtime.cache.slots
        engine.join(second)
        assert runtime.cache.slots > slots
        while engine.running:
            engine.step()
    for seq, prompt in ((first, short), (second, long)):
        assert seq.tokens[len(prompt) :] == plain(alone, prompt, 12)


def test_more_than_there_are_rows(runtime):
    seqs = sequences(0.0)
    with Engine(runtime, PlainDrafter()) as engine:
        for seq in seqs[:ROWS]:
            engine.join(seq)
        with pytest.raises(SelfspecError, match="all 4 rows of the cache are taken; let a sequence leave first"):
            engine.join(seqs[ROWS])
        assert len(engine.running) == ROWS


def test_a_second_engine_is_refused(runtime):
    with (
        Engine(runtime, PlainDrafter()),
        pytest.raises(BusyError, match="still generating"),
        Engine(runtime, PlainDrafter()),
    ):
        pass


@pytest.mark.parametrize(
    "draft", [Draft.chain([1] * 3), Draft((1,) * (WIDEST_DRAFT + 1), (-1,) * 65, None, (-1,) * 65)]
)
def test_a_draft_beyond_its_limit_is_refused(alone, draft):
    """Deeper than there is room, or wider than the cache allows; nothing was emitted."""

    class Wide(Scripted):
        def propose(self, seqs, limits):
            return [draft] * len(seqs)

    seq = SequenceState([1, 2], 4, Sampler())
    with Engine(alone, Wide(lambda tokens: [])) as engine:
        engine.join(seq)
        engine.step()  # the first round drafts nothing
        first = list(seq.tokens)
        with pytest.raises(SelfspecError, match=r"Wide drafted (3|65) tokens, .*; expected at most 64 tokens, 2 deep"):
            engine.step()
    assert seq.tokens == first


def test_the_first_token_takes_no_draft_and_no_pass_after_the_prompts(runtime, alone, monkeypatch):
    seqs = [SequenceState(list(prompt), 9, Sampler()) for prompt in PROMPTS[:3]]
    with Engine(runtime, LayerSkipDrafter(runtime, SKIP, FixedK(2))) as engine:
        engine.join(seqs[0])
        engine.step()
        for seq in seqs[1:]:
            engine.join(seq)
        assert engine.prefilled == tuple(seqs[1:])
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "forward", None)
            patch.setattr(runtime, "forward_drafts", None)
            first = {seq: outcome.tokens for seq, outcome in engine.step()}
        assert first == {
            seq: tuple(plain(alone, prompt, 1)) for seq, prompt in zip(seqs[1:], PROMPTS[1:3], strict=True)
        }
        assert engine.prefilled == ()
        assert [len(outcome.draft) for _, outcome in engine.step()] == [2, 2, 2]


def test_a_prompt_in_chunks_gives_the_same_first_token_and_hidden_states(runtime, alone):
    """`begin` gets the hidden states of all prompt tokens but the last, and the first outcome those of the last."""
    prompt, texts = PROMPTS[-1], []
    with alone.session(len(prompt)):
        expected = alone.forward(torch.tensor([prompt]), 0, hidden=(1, 3)).hidden

    class Reading(Scripted):
        hidden = (1, 3)

        def begin(self, seq, prefill):
            texts.append(prefill.hidden)

    for chunk in (None, 1, 4, 10, len(prompt)):
        seq = SequenceState(list(prompt), 5, Sampler())
        with Engine(runtime, Reading(lambda tokens: [])) as engine:
            assert engine.admit(seq)
            while engine.prefill(seq, chunk):
                pass
            ((_, outcome),) = engine.step()
        assert list(outcome.tokens) == plain(alone, prompt, 1)
        for layer, stream in expected.items():
            torch.testing.assert_close(texts[-1][layer], stream[:, :-1])
            torch.testing.assert_close(outcome.step.hidden[layer], stream[:, -1:])


def test_what_a_processor_raises_at_the_first_token_leaves_the_others_where_they_were(runtime, alone):
    """Nothing is emitted in that round; once the failing sequence has left, all others go on."""

    def broken(ids, scores):
        raise Broken

    texts, seqs = expected(alone, 0.0), sequences(0.0)
    seqs[1].sampler = Sampler(processors=[broken])
    with Engine(runtime, LayerSkipDrafter(runtime, SKIP, FixedK(2))) as engine:
        engine.join(seqs[0])
        engine.step()
        for seq in seqs[1:3]:
            engine.join(seq)
        with pytest.raises(Broken):
            engine.step()
        assert [len(tokens) for tokens in emitted(seqs)[:3]] == [1, 0, 0]
        engine.leave(seqs[1])
        assert engine.prefilled == (seqs[2],)
        while engine.running:
            engine.step()
    assert emitted(seqs)[0] == texts[0]
    assert emitted(seqs)[2] == texts[2]


def test_who_leaves_before_the_first_round_can_join_again(runtime, alone):
    seqs = sequences(0.0)
    with Engine(runtime, LayerSkipDrafter(runtime, SKIP, FixedK(2))) as engine:
        engine.join(seqs[0])
        engine.leave(seqs[0])
        assert engine.prefilled == ()
        assert engine.step() == []
        serve(engine, seqs[:2])
    assert emitted(seqs)[:2] == expected(alone, 0.0)[:2]


def test_a_seed_starts_its_own_controller_afresh(runtime):
    """Two with seeds learn apart, one without shares what the drafter has learnt."""
    drafter = LayerSkipDrafter(runtime, SKIP, AdaptiveThreshold(threshold=0.5, step=1.0))
    shared = drafter.controller
    seqs = [SequenceState(list(p), 12, Sampler(temperature=1.0, seed=1)) for p in PROMPTS[:2]]
    seqs.append(SequenceState(list(PROMPTS[2]), 12, Sampler()))
    with Engine(runtime, drafter) as engine:
        engine.join(seqs[0])
        engine.step()
        engine.step()
        first = drafter.controller_of(seqs[0])
        learnt = first.threshold
        engine.join(seqs[1])
        engine.join(seqs[2])
        assert drafter.controller_of(seqs[0]) is first
        assert (first.threshold, drafter.controller_of(seqs[1]).threshold) == (learnt, 0.5)
        assert learnt != 0.5
        assert drafter.controller_of(seqs[2]) is shared
        assert shared.threshold == 0.5
