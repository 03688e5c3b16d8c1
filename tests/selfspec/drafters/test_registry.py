"""Kinds of drafts: what a person's own one is, from its registration to decoding with it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import jsonschema
import pytest
import yaml

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.drafters import Guard, LayerSkipDrafter, LookupDrafter, PlainDrafter, make_drafter, register
from selfspec.drafters import registry as makers
from selfspec.profile import draft_spec as kinds
from selfspec.profile.draft_spec import DraftSpec, LayerSkipSpec, LookupSpec, PlainSpec, ProposerSpec
from selfspec.profile.reading import parse_profile, profile_schema, profile_text
from selfspec.profile.schema import Profile
from selfspec.speculation.drafts import Draft
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.draft_work import LOOKUP_CALL, draft_pass
from selfspec.types.identity import Identity

PROMPT = [3, 1, 4]


class EchoSpec(DraftSpec):
    """Drafts the last token again."""

    kind: Literal["echo"] = "echo"
    times: int = 2


class EchoDrafter(PlainDrafter):
    def __init__(self, times):
        self.times = times

    drafts = True

    def propose(self, seqs, limits):
        return [
            Draft.chain([seq.tokens[-1]] * min(self.times, limit.depth))
            for seq, limit in zip(seqs, limits, strict=True)
        ]


def make_echo(runtime, spec, profile):
    if spec.times > 8:
        raise SelfspecError(f"times {spec.times}: expected 8 at most")
    return EchoDrafter(spec.times)


@pytest.fixture
def echo(monkeypatch):
    """Registered for one test."""
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))
    monkeypatch.setattr(makers, "_MAKERS", dict(makers._MAKERS))
    register(EchoSpec, make_echo)


def parsed(draft):
    return parse_profile(f"version: 2\nmodel: {{layers: 16, name: builtin}}\ndraft: {draft}\n", source="p")


def test_a_kind_of_ones_own_is_read_checked_and_written(echo):
    profile = parsed("{kind: echo, times: 3}")
    assert profile.draft == EchoSpec(times=3)
    assert parse_profile(profile_text(profile), source="p") == profile
    assert parsed("{kind: echo}").draft.times == 2
    assert (profile.drafts, profile.skip_set, profile.draft_share) == (True, SkipSet(), 1.0)
    for draft, why in (
        ("{kind: echo, time: 3}", "p: unknown key 'draft.time'"),
        ("{kind: echo, times: '3'}", "p: draft.times: .* integer, got '3'"),
        (
            "{kind: other}",
            "p: draft.kind: 'other' is not known; known: plain, layer-skip, .*, head, model, merged, echo",
        ),
    ):
        with pytest.raises(SelfspecError, match=why):
            parsed(draft)


def test_it_is_in_the_json_schema(echo):
    validator = jsonschema.Draft202012Validator(profile_schema())
    for draft, valid in (({"kind": "echo", "times": 3}, True), ({"kind": "echo", "time": 3}, False)):
        assert validator.is_valid({"version": 2, "model": {"layers": 4}, "draft": draft}) == valid


def test_it_drafts(echo, llm):
    wrapped = selfspec.wrap(llm.model, llm.tokenizer, profile=parsed("{kind: echo, times: 3}"))
    assert isinstance(wrapped.drafter, Guard)
    assert isinstance(wrapped.drafter.drafter, EchoDrafter)
    out = wrapped.generate(PROMPT, max_new_tokens=12, drafter=wrapped.drafter_for(wrapped.profile))
    assert [done.drafted for done in out.stats.log][:3] == [0, 3, 3]
    assert out.tokens == llm.generate(PROMPT, max_new_tokens=12, drafter=PlainDrafter()).tokens
    with pytest.raises(SelfspecError, match="times 9: expected 8 at most"):
        selfspec.wrap(llm.model, llm.tokenizer, profile=parsed("{kind: echo, times: 9}"))


def test_it_has_no_controller_to_replace(echo):
    with pytest.raises(SelfspecError, match="a draft of kind 'echo' has no controller to replace"):
        parsed("{kind: echo}").with_controller(ControllerSpec(name="fixed"))
    replaced = parsed("{kind: layer-skip, skip: {mlp: [3]}}").with_controller(ControllerSpec(name="fixed"))
    assert replaced.draft == LayerSkipSpec.from_path(SkipSet((), (3,)), ControllerSpec(name="fixed"))


def test_a_kind_is_registered_once(echo):
    register(EchoSpec, make_echo)  # a notebook's cell is run again

    class Another(DraftSpec):
        kind: Literal["echo"] = "echo"

    class Unsaid(DraftSpec):
        pass

    with pytest.raises(SelfspecError, match="draft kind 'echo': it is .*EchoSpec; expected another name"):
        register(Another, make_echo)
    with pytest.raises(SelfspecError, match="Unsaid: no kind; expected the field kind"):
        register(Unsaid, make_echo)


def test_what_is_built_in(llm):
    assert isinstance(make_drafter(llm.runtime, Profile(model=llm.identity)), PlainDrafter)
    draft = LayerSkipSpec.from_path(
        DraftPath(SkipSet((3,), (5,)), tuple(range(9))), ControllerSpec(name="fixed", options={"k": 3}), candidates=2
    )
    made = make_drafter(llm.runtime, Profile(model=llm.identity, draft=draft))
    assert isinstance(made, LayerSkipDrafter)
    assert (made.path.skip, made.controller, made.candidates) == (SkipSet((3,), (5,)), FixedK(3), 2)


def test_guesses_below_a_path_and_alone(llm):
    low = parsed("{kind: layer-skip, int8: {mlp: [3]}, proposers: [{kind: lookup}], spared: 0.25}")
    assert low.draft.summary == "1 sub-layer in int8; proposers: lookup"
    assert parse_profile(profile_text(low), source="p") == low
    assert low.path_only.draft == LayerSkipSpec.from_path(DraftPath(int8=SkipSet((), (3,))))
    costs = CostModel(context=9, base=1, attention=1, mlp=1, widths=[1], verify=[40.0], round=0, wider=[1.5, 2.5])
    low = low.model_copy(update={"costs": costs})
    made = make_drafter(llm.runtime, low)
    assert isinstance(made, LayerSkipDrafter)
    assert made.proposer_chain.prices == (1.0, 1.5, 2.5)
    assert low.payoff.draft == pytest.approx(0.75 * 33 / 40)
    assert low.payoff.cost(((draft_pass(2), 3), (LOOKUP_CALL, 4))) == pytest.approx(3 * 1.5 * 33 / 40)
    alone = parsed("{kind: lookup}")
    again = parsed("{kind: recycle, candidates: 2}")
    assert (alone.drafts, alone.path_only) == (True, alone)
    assert isinstance(make_drafter(llm.runtime, alone), LookupDrafter)
    assert make_drafter(llm.runtime, alone.model_copy(update={"costs": costs})).controller.payoff.draft == 0
    text = llm.generate(PROMPT * 5, max_new_tokens=24, drafter=PlainDrafter()).tokens
    assert make_drafter(llm.runtime, again).candidates == 2
    assert alone.draft.summary == "lookup alone; proposers: lookup"
    for profile in (low, alone, again):
        assert llm.generate(PROMPT * 5, max_new_tokens=24, drafter=make_drafter(llm.runtime, profile)).tokens == text


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("{kind: lookup, controller: {name: magic}}", "magic"),
        ("{kind: lookup, proposers: []}", "proposers"),
        ("{kind: lookup, proposers: [{kind: store}]}", "proposer 'store': expected the path of its file"),
        ("{kind: lookup, proposers: [{kind: lookup, path: x}]}", "proposer 'lookup': takes no path"),
        ("{kind: lookup, proposers: [{kind: store, path: gone.store}]}", "gone.store: no such file"),
        ("{kind: layer-skip, proposers: []}", "proposers"),
        ("{kind: recycle, candidates: 0}", "candidates"),
    ],
)
def test_guesses_that_cannot_be(draft, said, llm):
    with pytest.raises(SelfspecError, match=said):
        make_drafter(llm.runtime, parsed(draft))


@pytest.mark.parametrize("kind", ["store", "answers"])
def test_a_file_of_texts_joins_what_a_profile_drafts(kind):
    """Beside its own guesses, once; where nothing is drafted, with lookup; and not where a kind takes none."""
    named = "some.texts" if kind == "store" else str(Path("some.texts").absolute())
    file = ProposerSpec(kind=kind, path=named)

    def joined(profile):
        return profile.with_proposers(**{kind: "some.texts"})

    path = parsed("{kind: layer-skip, int8: {mlp: [3]}, proposers: [{kind: lookup}]}")
    assert joined(path).draft.proposers == [ProposerSpec(), file]
    assert joined(joined(path)) == joined(path)
    assert joined(parsed("{kind: layer-skip, int8: {mlp: [3]}}")).draft.proposers == [file]
    assert joined(parsed("{kind: plain}")).draft == LookupSpec(proposers=[ProposerSpec(), file])
    assert path.with_proposers() is path
    both = path.with_proposers(store="a", answers="b").draft.proposers
    assert [(one.kind, one.path) for one in both] == [
        ("lookup", None),
        ("store", "a"),
        ("answers", str(Path("b").absolute())),
    ]
    with pytest.raises(SelfspecError, match=f"kind 'recycle' takes no proposers; leave the {kind} out"):
        joined(parsed("{kind: recycle}"))


@pytest.mark.parametrize(
    ("draft", "drafts"),
    [
        (PlainSpec(), False),
        (LayerSkipSpec(), False),
        (LayerSkipSpec(vocabulary=[1]), False),
        (LayerSkipSpec.from_path(SkipSet((1,))), True),
        (EchoSpec(), True),
    ],
)
def test_whether_it_drafts_is_what_drafts_word(draft, drafts):
    assert Profile(model=Identity(layers=4), draft=draft).drafts == drafts


def test_what_is_registered_without_a_drafter_says_so(monkeypatch, llm):
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))
    kinds.register_spec(EchoSpec)
    with pytest.raises(SelfspecError, match="kind 'echo' of drafts has no drafter"):
        make_drafter(llm.runtime, parsed("{kind: echo}"))


def test_a_draft_is_written_in_its_own_words():
    profile = Profile(model=Identity(layers=4), draft=LayerSkipSpec.from_path(SkipSet((1,))))
    said = {"kind": "layer-skip", "skip": {"attention": [1], "mlp": []}}
    said |= {"controller": {"name": "adaptive", "options": {}}, "candidates": 1}
    assert yaml.safe_load(profile_text(profile))["draft"] == said
    assert yaml.safe_load(profile_text(Profile(model=Identity(layers=4))))["draft"] == {"kind": "plain"}
