"""Rounds on the device, which a tape replays on a CPU, against the host's rounds: the same drafts and texts."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import weakref

import pytest
import torch
from device_rounds import VOCABULARY
from device_rounds import model as model
from device_rounds import switched_on as switched_on
from models import plain, run, small, tiny
from overlapping import CONTROLLERS, GAP, PATH, PROMPT, WORDS, assert_one_read_a_round, compared, device, host
from transformers import LogitsProcessor, MistralConfig

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.drafters import Guard, LayerSkipDrafter, PlainDrafter
from selfspec.engine.engine import Engine, decode
from selfspec.models.low_precision import fake
from selfspec.runtime.device_rounds import DeviceRounds
from selfspec.runtime.forward import LeanRuntime
from selfspec.runtime.workspace import Scratch
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import DraftPath, SkipSet

SAMPLERS = {
    "greedy": lambda: Sampler(),
    "match": lambda: Sampler(temperature=0.7, seed=3),
    "match, top": lambda: Sampler(temperature=1.3, top_k=7, top_p=0.9, seed=5),
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("controller", CONTROLLERS.values(), ids=CONTROLLERS)
def test_rounds_are_the_hosts(model, controller, sampler):
    _, _, rounds = compared(model, controller, sampler)
    assert any(one.accepted for one in rounds)


@pytest.mark.parametrize("name", ["static", "adaptive", "rate"])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_confidence_cuts_drafts_where_the_host_does(model, name, sampler):
    _, _, rounds = compared(model, CONTROLLERS[name], sampler, confidence=GAP, room=40)
    assert len({len(one.draft) for one in rounds[:-3]}) > 1


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_draft_vocabulary(model, sampler):
    compared(model, FixedK(4), sampler, path=WORDS)


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_windows(sampler):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    config = MistralConfig(**sizes, **heads, sliding_window=8, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    compared(tiny(config, seed=2), FixedK(4), sampler, room=50)


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("room", [1, 2, 3, 7, 11])
def test_the_token_limit_within_a_round(model, room, sampler):
    compared(model, FixedK(6), sampler, room=room)


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_an_end_token_within_a_round(model, sampler):
    text = run(host(model), PlainDrafter(), PROMPT, 24, sampler=sampler())[0]
    for end in set(text):
        _, ours, _ = compared(model, FixedK(8), sampler, ends=frozenset([end]))
        assert ours == text[: text.index(end) + 1]


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("after", [1, 2, 5, 8])
def test_a_stop_within_a_round(model, sampler, after):
    """What was launched beyond it leaves nothing behind: the runtime's next text is right."""
    text = run(host(model), PlainDrafter(), PROMPT, 30, sampler=sampler())[0]
    runtime, told = device(model), []
    drafter = LayerSkipDrafter(runtime, PATH, FixedK(6))

    def stop(token):
        told.append(token)
        return len(told) == after

    assert run(runtime, drafter, PROMPT, 30, sampler=sampler(), stop=stop)[0] == text[:after] == told
    assert run(runtime, drafter, PROMPT, 30, sampler=sampler())[0] == text


def test_an_exception_leaves_the_runtime_usable(model):
    runtime = device(model)
    drafter = LayerSkipDrafter(runtime, PATH, FixedK(6))
    text = plain(host(model), PROMPT, 30)

    def stop(token):
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        run(runtime, drafter, PROMPT, 30, stop=stop)
    assert run(runtime, drafter, PROMPT, 30)[0] == text
    seq = SequenceState(list(PROMPT), 30, Sampler())
    rounds = decode(runtime, drafter, seq)
    next(rounds)
    next(rounds)
    rounds.close()  # with a round in flight
    assert run(runtime, drafter, PROMPT, 30)[0] == text


@pytest.mark.parametrize("sampler", [SAMPLERS["greedy"], SAMPLERS["match"]], ids=["greedy", "match"])
def test_where_no_token_can_be_chosen(model, sampler):
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data.fill_(torch.nan)
    for runtime in (device(broken), host(broken)):
        with pytest.raises(SelfspecError, match="no token can be chosen"):
            run(
                runtime,
                LayerSkipDrafter(runtime, DraftPath(SkipSet((), (1,))), FixedK(2)),
                PROMPT,
                10,
                sampler=sampler(),
            )


def test_plain_decoding_runs_there_too(model):
    runtime = device(model)
    assert plain(runtime, PROMPT, 20) == plain(host(model), PROMPT, 20)
    assert (runtime._recorder.recorded, runtime._recorder.replayed) == (1, 19)


def test_the_first_round_runs_nothing(model):
    """The first token comes with the prompt's pass; the second round drafts, and the third is launched before."""
    runtime = device(model)
    rounds = decode(runtime, LayerSkipDrafter(runtime, PATH, FixedK(4)), SequenceState(list(PROMPT), 20, Sampler()))
    seen = [(len(next(rounds).draft), runtime._recorder.replayed) for _ in range(2)]
    rounds.close()
    assert seen == [(0, 0), (4, 2)]


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_under_a_guard(model, sampler):
    """It drafts on the device, and plainly where it may not draft; nothing is left of a text that ended."""
    runtime = device(model)
    guard = Guard(LayerSkipDrafter(runtime, PATH, FixedK(4)), clock=itertools.count().__next__)
    for prompt in (PROMPT, [7]):
        text, rounds = run(runtime, guard, prompt, 30, sampler=sampler())
        assert text == run(host(model), PlainDrafter(), prompt, 30, sampler=sampler())[0]
        assert len(rounds[0].draft) == 0
    lengths = {key.length for made in runtime.device_rounds._made.values() for key in made}
    assert lengths == {4} if sampler().seeded else {0, 4} <= lengths <= {0, 1, 2, 4}
    assert not guard._planned
    assert {key.n for made in runtime._graphs._made.values() for key in made} == {1}  # the prompt of one token


def test_sequences_that_come_and_go(model):
    """Alone and together on the device; each has the text that it has alone."""
    prompts = [PROMPT, [7], [3, 3, 3, 0, 5, 10, 8], [6, 2]]
    alone = [plain(host(model), prompt, 40) for prompt in prompts]
    runtime = device(model, rows=2)
    seqs = [SequenceState(list(prompt), 40, Sampler()) for prompt in prompts]
    waiting = list(seqs)
    with Engine(runtime, LayerSkipDrafter(runtime, PATH, FixedK(4))) as engine:
        for number in range(200):
            if waiting and (not engine.running or (number % 7 == 3 and len(engine.running) < 2)):
                engine.join(waiting.pop(0))
            engine.step()
    assert [seq.tokens[len(prompt) :] for seq, prompt in zip(seqs, prompts, strict=True)] == alone
    assert any(len(made) for made in runtime.device_rounds._made.values())
    assert len(runtime._graphs._made) > 0


@pytest.mark.parametrize("room", [1, 9])
def test_a_prompt_in_pieces_beside_a_round(model, room):
    """No round is in flight or planned while a prompt is prefilled; with `room` 1 it ends with its first token."""
    runtime = device(model, rows=2)
    guard = Guard(LayerSkipDrafter(runtime, PATH, FixedK(4)), clock=itertools.count().__next__)
    prompts = [PROMPT, [3, 3, 3, 0, 5]]
    one, other = seqs = [
        SequenceState(list(prompt), n, Sampler()) for prompt, n in zip(prompts, (40, room), strict=True)
    ]
    flights = []

    def step():
        engine.step()
        flights.append(engine._overlapped._flight is not None)
        assert len(guard._planned) == flights[-1]

    with Engine(runtime, guard) as engine:
        engine.join(one)
        step()
        step()
        assert engine.admit(other)
        while engine.prefill(other, 2):
            step()
        step()
        assert flights == [False, True, False, False, False]
        while engine.running:
            step()
    assert any(flights[5:])
    for seq, prompt, n in zip(seqs, prompts, (40, room), strict=True):
        assert seq.tokens[len(prompt) :] == plain(host(model), prompt, n)


def test_a_text_up_to_the_end_of_the_context(model):
    """The last rounds, which could write beyond it, run on the host."""
    runtime = device(model)
    room = model.config.max_position_embeddings + 1 - len(PROMPT)
    text = run(runtime, LayerSkipDrafter(runtime, PATH, FixedK(8)), PROMPT, room)[0]
    assert text == plain(host(model), PROMPT, room)
    assert len(text) == room


class Even(LogitsProcessor):
    """A processor that reads the tokens before the one that it scores."""

    def __call__(self, input_ids, scores):
        return scores + (input_ids.sum() % 2) * torch.arange(scores.shape[-1]) * 0.1


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 1, "tied": False}], ids=["greedy", "block"])
def test_a_processor_that_reads_tokens_runs_on_the_host(model, settings):
    runtime, other = device(model), host(model)
    drafters = [LayerSkipDrafter(one, PATH, FixedK(4)) for one in (runtime, other)]  # which keep what was captured
    text, expected = (
        run(one.runtime, one, PROMPT, 20, sampler=Sampler(processors=[Even()], **settings))[0] for one in drafters
    )
    assert text == expected
    assert not runtime.device_rounds._made


def test_a_refused_capture_runs_rounds_on_the_host_and_says_so_once(model, monkeypatch, caplog):
    runtime = device(model)
    refused = RuntimeError("operation not permitted when stream is capturing")

    def capture(body):
        raise refused

    with runtime.session(100):
        monkeypatch.setattr(runtime._graphs, "capture", capture)
    with caplog.at_level(logging.WARNING, "selfspec"):
        for sampler in (SAMPLERS["greedy"], SAMPLERS["match"]):
            text = run(runtime, LayerSkipDrafter(runtime, PATH, FixedK(4)), PROMPT, 20, sampler=sampler())[0]
            assert text == run(host(model), PlainDrafter(), PROMPT, 20, sampler=sampler())[0]
    assert [record.getMessage() for record in caplog.records][:1] == [
        "CUDA graph capture of rounds failed; rounds run on the host (operation not permitted when stream is capturing)"
    ]


def test_a_capture_keeps_what_it_computes_in(model, monkeypatch):
    """A graph knows addresses alone: what it reads and writes has to stay allocated."""
    made = []

    def kept(*args):
        scratch = Scratch(*args)
        made.append(weakref.ref(scratch))
        return scratch

    monkeypatch.setattr("selfspec.runtime.device_rounds.Scratch", kept)
    runtime = device(model)
    drafter = LayerSkipDrafter(runtime, PATH, FixedK(4))
    run(runtime, drafter, PROMPT, 20)
    gc.collect()
    assert len(made) == 2
    assert all(scratch() is not None for scratch in made)
    del drafter  # and with it the path
    gc.collect()
    assert not any(scratch() is not None for scratch in made)


def test_off_by_default_on_a_cpu(model, monkeypatch):
    monkeypatch.delenv("SELFSPEC_DEVICE_ROUND")
    runtime = device(model)
    run(runtime, LayerSkipDrafter(runtime, PATH, FixedK(4)), PROMPT, 20)
    assert runtime.device_rounds is None


def test_what_no_gpu_has_run_needs_the_variable(model):
    """Several sequences, and the rules `token` and `block`, with Triton kernels."""
    runtime = device(model)
    samplers = {**SAMPLERS, "token": lambda: Sampler(temperature=0.7)}
    seqs = {name: SequenceState(list(PROMPT), 9, sampler()) for name, sampler in samplers.items()}
    with runtime.session(100):
        rounds = runtime.device_rounds
        assert all(rounds.widest([seq]) > 0 for seq in seqs.values())
        assert rounds.widest([seqs["greedy"]] * 2) > 0
        rounds = DeviceRounds(runtime._graphs, runtime._full, everything=False)
        assert {name for name, seq in seqs.items() if rounds.widest([seq]) > 0} == set(SAMPLERS)
        assert rounds.widest([seqs["greedy"]] * 2) < 0


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("name", ["4 tokens", "adaptive", "rate"])
def test_one_read_a_round(model, monkeypatch, sampler, name):
    """Every way by which Python takes values of a tensor is counted, and each round's transfer is awaited once."""
    runtime = device(model)
    drafter = LayerSkipDrafter(runtime, PATH, copy.deepcopy(CONTROLLERS[name]))
    assert_one_read_a_round(monkeypatch, runtime, drafter, PROMPT, sampler)


def test_the_next_round_is_launched_before_the_last_is_read(model, monkeypatch):
    log = []
    runtime = device(model)
    with runtime.session(100):
        rounds = runtime.device_rounds
    for name in ("launch", "read"):
        before = getattr(rounds, name)
        monkeypatch.setattr(rounds, name, lambda *args, before=before, name=name: (log.append(name), before(*args))[1])
    run(runtime, LayerSkipDrafter(runtime, PATH, FixedK(4)), PROMPT, 12)
    assert log[:5] == ["launch", "launch", "read", "launch", "read"]
    assert log.count("launch") - log.count("read") in (0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("name", ["4 tokens", "adaptive", "rate"])
def test_cuda_graphs_of_rounds_give_the_same_texts(name, sampler, caplog):
    model = small(VOCABULARY, seed=2).cuda()
    with caplog.at_level(logging.WARNING, "selfspec"):
        runtime = LeanRuntime(model, kernel=fake)
        drafter = LayerSkipDrafter(runtime, PATH, copy.deepcopy(CONTROLLERS[name]), confidence=GAP)
        texts = [run(runtime, drafter, PROMPT, room, sampler=sampler())[0] for room in (40, 7, 40)]
    assert not caplog.records
    assert runtime.device_rounds._made
    on_cpu = host(small(VOCABULARY, seed=2))
    assert texts == [run(on_cpu, PlainDrafter(), PROMPT, room, sampler=sampler())[0] for room in (40, 7, 40)]
