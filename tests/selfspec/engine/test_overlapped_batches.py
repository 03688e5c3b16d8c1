"""Rounds of several sequences on the device, which a tape replays on a CPU: each has the text that it has alone."""

from __future__ import annotations

import copy
import random
from itertools import chain

import pytest
import torch
from device_rounds import VOCABULARY
from device_rounds import model as model
from device_rounds import switched_on as switched_on
from models import plain, run, small, tiny
from tape import Tape, Waits, noted_reads, rounds_to_end
from transformers import MistralConfig

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import AdaptiveThreshold, BatchDraftScheduler, FixedK, RateOptimal
from selfspec.drafters import Guard, LayerSkipDrafter, PlainDrafter
from selfspec.drafters.batch_policy import decide_together
from selfspec.engine.engine import Engine
from selfspec.models.low_precision import fake
from selfspec.runtime.device_rounds import block_of
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.rules import block, token
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import Confidence
from selfspec.types.costs import PassCosts
from selfspec.types.draft_path import DraftPath, SkipSet

PROMPTS = [[1, 4, 2, 9], [7], [3, 3, 3, 0, 5, 10, 8], [6, 2], [5, 5, 1]]
ROOMS = [17, 3, 24, 9, 13]  # so that they end at different times
PATH = DraftPath(SkipSet((), (1,)), int8=SkipSet((0, 1, 2), (0, 2)), head="int8")
GAP = Confidence(bias=3.5, probability=0.4, gap=0.8)
CONTROLLERS = {
    "4 tokens": FixedK(4),
    "adaptive": AdaptiveThreshold(0.4, target=0.5, step=0.9),
    "rate": RateOptimal(memory=0.8, strength=2.0),
}
SAMPLERS = {
    "greedy": lambda i: Sampler(),
    "match": lambda i: Sampler(temperature=0.7, seed=i),
    "match, top": lambda i: Sampler(temperature=1.3, top_k=7, top_p=0.9, seed=10 + i),
}


STREAMED = {"token": token, "block": block}


def untied(i):
    """Samplers of which many drafted tokens are rejected."""
    return Sampler(temperature=0.3, top_k=9, seed=i, tied=False)


def device(model, rows):
    return LeanRuntime(model, kernel=fake, recorder=Tape(), rows=rows)


def host(model):
    return LeanRuntime(model, kernel=fake)


def sequences(count, sampler, rule=None):
    return [SequenceState(list(PROMPTS[i]), ROOMS[i], sampler(i), rule=rule) for i in range(count)]


def texts_of(seqs):
    return [seq.tokens[len(PROMPTS[i]) :] for i, seq in enumerate(seqs)]


def alone(model, count, sampler):
    """The texts of plain decoding on the host, one sequence at a time."""
    runtime = host(model)
    return [run(runtime, PlainDrafter(), PROMPTS[i], ROOMS[i], sampler=sampler(i))[0] for i in range(count)]


def drafting_alone(model, count, sampler, rule):
    """The texts of sequences that draft 4 tokens a round on the host, one sequence at a time."""
    runtime = host(model)
    drafter = LayerSkipDrafter(runtime, PATH, FixedK(4))
    return [run(runtime, drafter, PROMPTS[i], ROOMS[i], sampler=sampler(i), rule=rule)[0] for i in range(count)]


def together(runtime, drafter, seqs):
    """Decode sequences that join at once; return the outcomes of each."""
    outcomes = {seq: [] for seq in seqs}
    with Engine(runtime, drafter) as engine:
        for seq in seqs:
            engine.join(seq)
        while engine.running:
            for seq, outcome in engine.step():
                outcomes[seq].append(outcome)
    return list(outcomes.values())


def blocks(runtime):
    """The numbers of cache rows of the rounds that were captured."""
    return {key.batch for made in runtime.device_rounds._made.values() for key in made}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.parametrize(("count", "rows"), [(1, 1), (2, 2), (3, 4), (5, 8), (5, 5)])
def test_texts_are_the_hosts(model, count, rows, name, sampler):
    """Rows end at different times, and are then padding, as those are that no sequence has."""
    runtime = device(model, rows)
    drafter = LayerSkipDrafter(runtime, PATH, copy.deepcopy(CONTROLLERS[name]), confidence=GAP)
    seqs = sequences(count, sampler)
    rounds = together(runtime, drafter, seqs)
    assert texts_of(seqs) == alone(model, count, sampler)
    assert any(one.accepted for each in rounds for one in each)
    assert max(blocks(runtime)) == block_of(range(count), rows).stop
    passes = {(key.batch, key.n) for made in runtime._graphs._made.values() for key in made}
    assert passes <= {(1, 1)}  # of the prompt of one token; no others beside prompts' and rounds'


def test_drafts_and_confidences_are_those_of_each_sequence_alone(model):
    """With a controller that does not learn, each draft of a fixed length is what a round of one sequence drafts."""
    outcomes = []
    for rows in (1, 4):
        runtime = device(model, rows)
        drafter = LayerSkipDrafter(runtime, PATH, FixedK(4), confidence=GAP)
        seqs = sequences(3, SAMPLERS["match"])
        groups = [seqs] if rows == 4 else [[seq] for seq in seqs]
        outcomes.append([each for group in groups for each in together(runtime, drafter, group)])
    for one, other in zip(*map(chain.from_iterable, outcomes), strict=True):
        assert (one.draft.tokens, one.path, one.tokens) == (other.draft.tokens, other.path, other.tokens)
        assert one.draft.confidence == pytest.approx(other.draft.confidence, rel=1e-9)
        torch.testing.assert_close(one.step.logits, other.step.logits, atol=1e-9, rtol=1e-9)
        assert (one.p is None) == (other.p is None)
        if one.p is not None:
            torch.testing.assert_close(one.p, other.p, atol=1e-9, rtol=1e-9)


def steps_with_arrivals(engine, seqs, chance):
    """Step until no sequence is left, and yield after each step; they join at random, their prompts in pieces."""
    waiting = list(seqs)
    while waiting or engine.running or engine.prefilling:
        if waiting and chance.random() < 0.5 and engine.admit(waiting[0]):
            waiting.pop(0)
        if engine.prefilling and chance.random() < 0.7:
            engine.prefill(engine.prefilling[0], 2)
        engine.step()
        yield


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_sequences_join_and_leave(model, sampler, seed):
    """Prompts in pieces beside others' rounds, rows used again, and a sequence that leaves before its end."""
    chance, runtime = random.Random(seed), device(model, 4)
    expected, seqs = alone(model, 5, sampler), sequences(5, sampler)
    given_up = chance.randrange(5)
    guard = Guard(LayerSkipDrafter(runtime, PATH, FixedK(4)))
    with Engine(runtime, guard) as engine:
        for _ in steps_with_arrivals(engine, seqs, chance):
            gone = seqs[given_up]
            if gone in engine.running and len(gone.tokens) > len(PROMPTS[given_up]) + 1:
                engine.leave(gone)
    for i, (text, whole) in enumerate(zip(texts_of(seqs), expected, strict=True)):
        assert text == (whole[: len(text)] if i == given_up else whole)
    assert blocks(runtime) >= {2, 4}


def test_a_stop_of_one_row_on_the_host_and_an_end_of_another_on_the_device(model):
    whole = alone(model, 3, SAMPLERS["greedy"])
    end, told = whole[2][5], []

    def stop(token):
        told.append(token)
        return len(told) == 4

    runtime, seqs = device(model, 4), sequences(3, SAMPLERS["greedy"])
    seqs[0].stop, seqs[2].ends = stop, frozenset([end])
    together(runtime, LayerSkipDrafter(runtime, PATH, FixedK(6)), seqs)
    assert texts_of(seqs) == [whole[0][:4], whole[1], whole[2][: whole[2].index(end) + 1]]


@pytest.mark.parametrize("name", ["greedy", "match"])
def test_windows(name):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    config = MistralConfig(**sizes, **heads, sliding_window=8, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    windowed = tiny(config, seed=2)
    runtime, seqs = device(windowed, 4), sequences(3, SAMPLERS[name])
    drafter = LayerSkipDrafter(runtime, PATH, FixedK(4))
    together(runtime, drafter, seqs)
    assert texts_of(seqs) == alone(windowed, 3, SAMPLERS[name])
    assert 4 in blocks(runtime)


def test_padding_writes_where_nobody_reads(model):
    """Rows in prefill and rows of cached prefixes keep their keys while others' rounds run beside them."""
    runtime = device(model, 4)
    first, last, between = (SequenceState(list(PROMPTS[i]), 20, Sampler()) for i in (0, 2, 4))
    with Engine(runtime, LayerSkipDrafter(runtime, PATH, FixedK(4))) as engine:
        for seq in (first, between, last):
            engine.join(seq)
        engine.step()
        engine.leave(between)
        keys = [layer[between.row].clone() for layer in runtime.cache.keys]
        while engine.running:
            engine.step()
        for before, layer in zip(keys, runtime.cache.keys, strict=True):
            slots = runtime.cache.slots
            assert torch.equal(before[:, :slots], layer[between.row][:, :slots])
    assert max(blocks(runtime)) == 4
    assert first.tokens[4:] == plain(host(model), PROMPTS[0], 20)


@pytest.mark.parametrize("broken", [0, 2])
def test_where_one_row_has_no_token_nothing_is_emitted(model, monkeypatch, broken):
    runtime, seqs = device(model, 4), sequences(3, SAMPLERS["greedy"])
    with Engine(runtime, PlainDrafter()) as engine:
        for seq in seqs:
            engine.join(seq)
        engine.step()
        engine.step()
        flight = engine._overlapped._flight
        with torch.inference_mode():
            flight.transfer.wait()[seqs[broken].row - flight.first_row, 3] = 0
        before = [list(seq.tokens) for seq in seqs if seq.remaining]
        with pytest.raises(SelfspecError, match="no token can be chosen"):
            engine.step()
        assert [seq.tokens for seq in seqs if seq.remaining] == before


def test_samplers_that_differ_run_on_the_host(model):
    runtime, seqs = device(model, 2), sequences(2, lambda i: Sampler(temperature=0.5 + i, seed=i))
    rounds = []
    with Engine(runtime, LayerSkipDrafter(runtime, PATH, FixedK(2))) as engine:
        for seq in seqs:
            engine.join(seq)
        while engine.running:
            rounds.append(len(engine.running))
            engine.step()
    assert blocks(runtime) == {1}  # once one is left
    assert texts_of(seqs) == alone(model, 2, lambda i: Sampler(temperature=0.5 + i, seed=i))


@pytest.mark.parametrize("rule", STREAMED.values(), ids=STREAMED)
@pytest.mark.parametrize(("count", "rows"), [(2, 2), (3, 4), (5, 5)])
def test_each_sequence_draws_from_its_own_stream(model, count, rows, rule):
    runtime, seqs = device(model, rows), sequences(count, untied, rule)
    drafter = LayerSkipDrafter(runtime, PATH, FixedK(4))
    rounds = together(runtime, drafter, seqs)
    assert texts_of(seqs) == drafting_alone(model, count, untied, rule)
    assert any(one.accepted < len(one.draft) for each in rounds for one in each)
    assert max(blocks(runtime)) == block_of(range(count), rows).stop
    assert {key.rule for made in runtime.device_rounds._made.values() for key in made} == {rule}


@pytest.mark.parametrize("rule", STREAMED.values(), ids=STREAMED)
def test_streams_of_sequences_that_join_and_leave(model, rule):
    """A discarded round uses no number, and rows that are used again have another stream."""
    chance, runtime, seqs = random.Random(0), device(model, 4), sequences(5, untied, rule)
    with Engine(runtime, LayerSkipDrafter(runtime, PATH, FixedK(4))) as engine:
        for _ in steps_with_arrivals(engine, seqs, chance):
            pass
    assert texts_of(seqs) == drafting_alone(model, 5, untied, rule)
    assert blocks(runtime) >= {2, 4}


def test_sequences_that_share_a_stream_run_on_the_host(model):
    runtime, shared = device(model, 2), untied(0)
    drafter = LayerSkipDrafter(runtime, PATH, FixedK(4))
    together(runtime, drafter, sequences(2, lambda i: shared))
    assert blocks(runtime) == {1}  # once one is left


@pytest.mark.parametrize(
    ("rows", "of", "block"),
    [
        ([0], 1, (0, 1)),
        ([3], 8, (3, 4)),
        ([2, 3], 8, (2, 4)),
        ([1, 2], 8, (0, 4)),
        ([0, 4], 5, (0, 5)),
        ([4], 5, (4, 5)),
    ],
)
def test_blocks_of_rows(rows, of, block):
    assert block_of(rows, of) == slice(*block)


def test_the_load_chooses_one_length_for_all(model):
    """Where passes over more tokens cost too much, nothing is drafted; where they cost nothing, the longest is."""
    seen = {}
    for name, verified in (("dear", [float(n) for n in range(65)]), ("cheap", [0.0, *[1.0] * 64])):
        costs = PassCosts(tuple(verified), (0.0, *[0.01] * 64))
        load, runtime = BatchDraftScheduler(costs, first=0.9), device(model, 4)
        drafter = LayerSkipDrafter(runtime, PATH, FixedK(8))
        decide_together(drafter, load)
        seqs = sequences(3, SAMPLERS["greedy"])
        with Engine(runtime, drafter) as engine:
            for seq in seqs:
                engine.join(seq)
            engine.step()
            while engine.running:
                load.begin(len(engine.running))
                for _, one in engine.step():
                    load.record_draft(one.draft.depth, one.accepted, len(one.tokens), nodes=len(one.draft))
        seen[name] = {key.length for made in runtime.device_rounds._made.values() for key in made if key.batch > 1}
        assert texts_of(seqs) == alone(model, 3, SAMPLERS["greedy"])
    assert seen == {"dear": {0}, "cheap": {8}}


@pytest.mark.parametrize(
    ("sampler", "rule"),
    [*((sampler, None) for sampler in SAMPLERS.values()), *((untied, rule) for rule in STREAMED.values())],
    ids=[*SAMPLERS, *STREAMED],
)
@pytest.mark.parametrize("name", ["adaptive", "rate"])
def test_one_read_a_round_for_all_rows(model, monkeypatch, sampler, rule, name):
    runtime, waits = device(model, 4), Waits()
    drafter = LayerSkipDrafter(runtime, PATH, copy.deepcopy(CONTROLLERS[name]))
    together(runtime, drafter, sequences(3, sampler, rule))  # captures, which read what they like
    reads = noted_reads(monkeypatch)
    with Engine(runtime, drafter) as engine:
        for seq in sequences(3, sampler, rule):
            engine.join(seq)
        engine.step()  # the first tokens, which the host chooses
        rounds = rounds_to_end(engine, reads, waits)
    assert waits.count == 0
    assert reads == ["tolist"] * rounds


@pytest.mark.gpu
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("name", CONTROLLERS)
def test_cuda_graphs_of_rounds_give_the_same_texts(name, sampler):
    runtime = LeanRuntime(small(VOCABULARY, seed=2).cuda(), kernel=fake, rows=8)
    seqs = sequences(5, sampler)
    together(runtime, LayerSkipDrafter(runtime, PATH, copy.deepcopy(CONTROLLERS[name]), confidence=GAP), seqs)
    assert 8 in blocks(runtime)
    assert texts_of(seqs) == alone(small(VOCABULARY, seed=2), 5, sampler)
