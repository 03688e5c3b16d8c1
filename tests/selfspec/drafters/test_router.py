"""Routes: each sequence takes the way to draft that has brought most, and keeps it; a seed takes the first."""

from __future__ import annotations

import pytest
from models import plain, run, small
from toys import always_wrong, oracle

from selfspec.basics.errors import SelfspecError
from selfspec.drafters import Guard, LayerSkipDrafter, Route, Router, make_drafter
from selfspec.llm.llm import LLM
from selfspec.profile.reading import parse_profile, profile_text
from selfspec.profile.schema import Profile
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafter import Limit
from selfspec.speculation.sampling import Sampler
from selfspec.types.acceptance import PayoffModel
from selfspec.types.draft_work import steps_of

VOCABULARY, PROMPT = 11, [1, 4, 2, 9]
CHEAP = PayoffModel(0.0, wider=(0.0,))


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(VOCABULARY, seed=2))


class Counted:
    """A drafter that says how many sequences began with it."""

    def __init__(self, drafter):
        self.drafter, self.begun = drafter, 0

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def begin(self, seq, prefill):
        self.begun += 1
        self.drafter.begin(seq, prefill)


@pytest.fixture
def both(runtime):
    """A drafter that is always wrong, and one that is always right."""
    text = plain(runtime, PROMPT, 20)
    return Counted(always_wrong(PROMPT, text, VOCABULARY)), Counted(oracle(PROMPT, text))


def decode(runtime, router, times, **how):
    return [run(runtime, router, PROMPT, 20, sampler=Sampler(**how))[0] for _ in range(times)]


def test_what_brings_more_is_taken(runtime, both):
    """A wrong one that promises more is given up, and now and then tried again."""
    wrong, right = both
    router = Router([Route(wrong, CHEAP, 1.3), Route(right, CHEAP, 1.2)])
    texts = decode(runtime, router, 40)
    assert texts == [plain(runtime, PROMPT, 20)] * 40
    assert 1 <= wrong.begun < 10
    assert right.begun > 30


def test_with_none_better_the_first_is_taken(runtime, both):
    wrong, right = both
    decode(runtime, Router([Route(right, CHEAP, 1.2), Route(wrong, CHEAP, 1.2)]), 10)
    assert (right.begun, wrong.begun) == (10, 0)


def test_a_seed_takes_the_first_and_teaches_nothing(runtime, both):
    wrong, right = both
    router = Router([Route(wrong, CHEAP, 1.0), Route(right, CHEAP, 5.0)])
    rates = [route.rate for route in router.routes]
    decode(runtime, router, 3, temperature=0.8, seed=1)
    assert (wrong.begun, right.begun) == (3, 0)
    assert [route.rate for route in router.routes] == rates


def test_what_is_dear_counts_for_less(runtime):
    """Both are right, but one takes a plain step for each token."""
    text = plain(runtime, PROMPT, 20)

    class Dear(Counted):
        def propose(self, seqs, limits):
            drafts = self.drafter.propose(seqs, limits)
            return [type(d)(d.tokens, d.parents, d.q, d.q_row, work=steps_of(len(d))) for d in drafts]

    dear, cheap = Dear(oracle(PROMPT, text)), Counted(oracle(PROMPT, text))
    decode(runtime, Router([Route(dear, PayoffModel(1.0, wider=(1.0,)), 2.0), Route(cheap, CHEAP, 1.9)]), 20)
    assert cheap.begun > 15


def test_the_dearest_work_is_that_of_any(both):
    wrong, right = both
    wrong.max_work, right.max_work = (lambda limit: steps_of(1)), (lambda limit: steps_of(2))
    assert Router(
        [Route(wrong, PayoffModel(0.9, wider=(0.9,))), Route(right, PayoffModel(0.2, wider=(0.2,)))]
    ).max_work(Limit(5)) == steps_of(1)
    with pytest.raises(ValueError, match="at least one"):
        Router([])


TWO = """
version: 2
model: {layers: 4}
draft: {kind: layer-skip, skip: {attention: [1]}}
predicted: {speedup: 1.5, tokens_per_second: 50.0, acceptance_rate: 0.5, tokens_per_round: 2.0, draft_cost: 0.5}
also:
- model: {layers: 4}
  draft: {kind: lookup}
- model: {layers: 4}
"""


def test_a_profile_holds_several_ways_to_draft():
    profile = parse_profile(TWO, source="two.yaml")
    assert [one.draft.kind for one in profile.alternatives] == ["layer-skip", "lookup", "plain"]
    assert not any(one.also for one in profile.alternatives)
    again = parse_profile(profile_text(profile), source="again.yaml")
    assert again == profile
    assert "also: []" not in profile_text(profile)
    assert parse_profile(
        "version: 2\nmodel: {layers: 4}\nalso: [{model: {layers: 4}, draft: {kind: recycle}}]", source="x"
    ).drafts
    router = make_drafter(LeanRuntime(small(VOCABULARY, seed=2)), profile)
    assert isinstance(router, Router)
    assert [type(route.drafter).__name__ for route in router.routes] == [
        "LayerSkipDrafter",
        "LookupDrafter",
        "PlainDrafter",
    ]
    assert [route.expected for route in router.routes] == [1.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("also", "said"),
    [
        ("[{model: {layers: 5}}]", "also.0: is of another model: layers"),
        (
            "[{model: {layers: 4}, also: [{model: {layers: 4}}]}]",
            "also.0: expected a profile without parts and without",
        ),
        ("[{model: {layers: 4}, draft: {kind: layer-skip, skip: {mlp: [4]}}}]", "layer 4"),
        ("[3]", "also.0: "),
        ("x", "also: "),
    ],
)
def test_ways_that_do_not_go_together(also, said):
    with pytest.raises(SelfspecError, match=said):
        parse_profile(f"version: 2\nmodel: {{layers: 4}}\nalso: {also}", source="x.yaml")


def test_each_way_has_a_guard_of_its_own():
    model = small(VOCABULARY, 4, seed=2)
    profile = parse_profile(TWO, source="two.yaml")
    llm = LLM(model, None, profile=profile)
    assert isinstance(llm.drafter, Router)
    assert all(isinstance(route.drafter, Guard) for route in llm.drafter.routes)
    assert isinstance(llm.drafter.routes[0].drafter.drafter, LayerSkipDrafter)


def test_what_is_said_of_one_is_said_of_all():
    one, other = (
        Profile.model_validate({"model": {"layers": 4}, "draft": {"kind": "layer-skip", "skip": {"mlp": [n]}}})
        for n in (1, 2)
    )
    both = one.with_alternatives([other])
    assert both.alternatives == [one, other]
    assert both.with_alternatives([both]).alternatives == [one, other, one, other]
    for changed, single in (
        (both.with_proposers(store="x"), lambda p: p.with_proposers(store="x")),
        (both.with_controller(one.layer_skip.controller), lambda p: p.with_controller(one.layer_skip.controller)),
    ):
        assert changed.alternatives == [single(one), single(other)]
    assert both.path_only == one.path_only
