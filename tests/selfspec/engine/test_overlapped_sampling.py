"""Rounds on the device with the rules `token` and `block`: with the same random numbers they are the host's rounds."""

from __future__ import annotations

import copy

import pytest
import torch
from device_rounds import VOCABULARY
from device_rounds import model as model
from device_rounds import switched_on as switched_on
from models import run, small
from overlapping import CONTROLLERS, GAP, PATH, PROMPT, WORDS, assert_one_read_a_round, compared, device, host

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.engine.engine import Engine
from selfspec.models.low_precision import fake
from selfspec.runtime.device_noise import NUMBERS
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.rules import RULES
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

SAMPLERS = {
    "temperature": lambda: Sampler(temperature=0.2, seed=3, tied=False),
    "top": lambda: Sampler(temperature=0.4, top_k=7, top_p=0.95, seed=5, tied=False),
}
each_rule = pytest.mark.parametrize("rule", ["token", "block"])
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


@each_rule
@each_sampler
@pytest.mark.parametrize("controller", CONTROLLERS.values(), ids=CONTROLLERS)
def test_rounds_are_the_hosts(model, controller, sampler, rule):
    _, _, rounds = compared(model, controller, sampler, rule=rule, room=40)
    assert any(one.accepted for one in rounds)
    assert any(one.accepted < len(one.draft) for one in rounds)


@each_rule
@pytest.mark.parametrize("name", ["static", "adaptive", "rate"])
def test_confidence_cuts_drafts_where_the_host_does(model, name, rule):
    _, _, rounds = compared(model, CONTROLLERS[name], SAMPLERS["temperature"], rule=rule, confidence=GAP, room=40)
    assert len({len(one.draft) for one in rounds[:-3]}) > 1


@each_rule
@each_sampler
def test_a_draft_vocabulary(model, sampler, rule):
    compared(model, FixedK(4), sampler, path=WORDS, rule=rule)


@each_rule
@pytest.mark.parametrize("room", [1, 2, 3, 7, 11])
def test_the_token_limit_within_a_round(model, room, rule):
    compared(model, FixedK(6), SAMPLERS["temperature"], room=room, rule=rule)


@each_rule
def test_an_end_token_within_a_round(model, rule):
    """A drafted one and one that the target draws: no token follows, and no token is drafted after it."""
    drafted = set()
    for end in range(VOCABULARY):
        _, text, rounds = compared(model, FixedK(4), SAMPLERS["top"], rule=rule, ends=frozenset([end]), room=30)
        assert end not in text[:-1]
        drafted |= {one.accepted == len(one.tokens) for one in rounds[1:] if one.tokens[-1] == end}
    assert drafted == {True, False}


@each_rule
def test_one_stream_through_texts_and_rounds_on_both_sides(model, rule):
    """Texts that stop early, up to the end of the context, and plain ones use the numbers that the host would use."""
    outcomes = []
    for runtime in (device(model), host(model)):
        sampler = SAMPLERS["temperature"]()
        whole = model.config.max_position_embeddings + 1 - len(PROMPT)
        for drafter, room, after in (
            (LayerSkipDrafter(runtime, PATH, FixedK(6)), 30, 8),
            (LayerSkipDrafter(runtime, PATH, FixedK(8)), whole, whole),
            (PlainDrafter(), 9, 9),
            (LayerSkipDrafter(runtime, PATH, FixedK(2)), 20, 20),
        ):
            seen = []

            def stop(token, seen=seen, after=after):
                seen.append(token)
                return len(seen) == after

            text = run(runtime, drafter, PROMPT, room, sampler=sampler, rule=rule, stop=stop)[0]
            assert len(text) == after
            outcomes.append((text, sampler.numbers_used))
    assert outcomes[:4] == outcomes[4:]
    assert outcomes[3][1] > 1.5 * NUMBERS / 4


@each_rule
def test_where_no_token_can_be_chosen(model, rule):
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data.fill_(torch.nan)
    runtime = device(broken)
    seq = SequenceState(list(PROMPT), 10, SAMPLERS["temperature"](), rule=RULES[rule])
    with Engine(runtime, PlainDrafter()) as engine:
        engine.join(seq)
        engine._prefilled.outputs.clear()
        with pytest.raises(SelfspecError, match="no token can be chosen"):
            engine.step()
    assert runtime.device_rounds._made
    assert seq.tokens == PROMPT


def test_a_rule_that_does_not_fit_the_sampler_runs_on_the_host(model):
    """With tied noise the host's rule `token` draws with that noise."""
    runtime, other = device(model), host(model)
    drafters = [LayerSkipDrafter(one, PATH, FixedK(4)) for one in (runtime, other)]  # which keep what was captured
    text, expected = (
        run(one.runtime, one, PROMPT, 20, sampler=Sampler(temperature=1.0, seed=1), rule=RULES["token"])[0]
        for one in drafters
    )
    assert text == expected
    assert not runtime.device_rounds._made


@each_rule
@each_sampler
@pytest.mark.parametrize("name", ["4 tokens", "adaptive", "rate"])
def test_one_read_a_round(model, monkeypatch, sampler, rule, name):
    runtime = device(model)
    drafter = LayerSkipDrafter(runtime, PATH, copy.deepcopy(CONTROLLERS[name]))
    assert_one_read_a_round(monkeypatch, runtime, drafter, PROMPT, sampler, RULES[rule])


@pytest.mark.gpu
@each_rule
@each_sampler
@pytest.mark.parametrize("name", ["4 tokens", "12 tokens"])
def test_cuda_graphs_of_rounds_give_the_same_texts(name, sampler, rule):
    runtime, on_cpu = LeanRuntime(small(VOCABULARY, seed=2).cuda(), kernel=fake), host(small(VOCABULARY, seed=2))
    drafters = [LayerSkipDrafter(one, PATH, CONTROLLERS[name]) for one in (runtime, on_cpu)]
    text, expected = (run(one.runtime, one, PROMPT, 40, sampler=sampler(), rule=rule)[0] for one in drafters)
    assert runtime.device_rounds._made
    assert text == expected
