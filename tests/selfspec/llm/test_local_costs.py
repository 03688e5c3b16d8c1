"""What rounds take on this runtime, by a clock that is told what passes take."""

from __future__ import annotations

import pytest
from models import small
from overlapping import device

import selfspec
from selfspec.drafters import Guard, PlainDrafter, Route, Router, calibrate
from selfspec.llm import local_costs
from selfspec.llm.llm import LLM
from selfspec.llm.local_costs import local_payoff, measure_shares
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.acceptance import PayoffModel
from selfspec.types.draft_path import FULL, DraftPath, SkipSet

PATH = DraftPath(SkipSet((0,), (1,)))
COSTS = {"context": 9, "base": 0.01, "attention": 0, "mlp": 0, "widths": [1, 8], "verify": [1, 1.01], "round": 0}


@pytest.fixture
def passes(monkeypatch, tmp_path):
    """A clock that only passes move, and their rows: one takes 10 in full, 2 along a path, each further one 1."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    now, ran = [0.0], []
    forward = LeanRuntime.forward

    def timed(self, tokens, positions, *, path=None, **options):
        whole = path is None or path is self.compile(FULL)
        now[0] += (10 if whole else 2) + tokens.shape[1] - 1
        if options.get("logits", "all") == "all":  # not a prompt's
            ran.append(tokens.shape[1])
        return forward(self, tokens, positions, path=path, **options)

    monkeypatch.setattr(LeanRuntime, "forward", timed)
    monkeypatch.setattr(local_costs, "measure_shares", measure_shares)
    monkeypatch.setattr(local_costs.time, "perf_counter", lambda: now[0])
    return ran


@pytest.fixture(scope="module")
def model():
    model = small()
    model.config.max_position_embeddings = 512
    return model


def profile_of(runtime, path=PATH, **told):
    draft = LayerSkipSpec.from_path(path) if path.cheaper else LayerSkipSpec()
    return Profile(model=runtime.skeleton.identity, draft=draft, **told)


@pytest.mark.parametrize("told", [{}, {"costs": COSTS}], ids=["nothing", "costs"])
def test_rounds_and_draft_steps_cost_what_they_do_here(passes, model, told):
    runtime = LeanRuntime(model)
    found = local_payoff(runtime, profile_of(runtime, **told))
    rows = [found.rounds[n] for n in (0, 1, 2, 3, 4, 8, 16, 17, 32)]
    assert rows == pytest.approx([1.0, 1.0, 1.1, 1.2, 1.3, 1.7, 2.5, 2.6, 4.1])
    assert (found.draft, found.wider[0]) == pytest.approx((0.2, 0.2))
    before = profile_of(runtime, **told).payoff
    assert found.wider == pytest.approx([0.2 * share / before.wider[0] for share in before.wider])
    assert found.curve == before.curve


def test_where_no_path_drafts_only_rounds_are_known(passes, model):
    runtime = LeanRuntime(model)
    told = profile_of(runtime, FULL)
    found = local_payoff(runtime, told)
    assert found.rounds[8] == pytest.approx(1.7)
    assert (found.draft, found.wider) == (told.payoff.draft, told.payoff.wider)


def test_it_is_measured_once(passes, model, tmp_path):
    runtime = LeanRuntime(model)
    local_payoff(runtime, profile_of(runtime))
    (kept,) = (tmp_path / "costs").iterdir()
    passes.clear()
    assert local_payoff(runtime, profile_of(runtime)).rounds[8] == pytest.approx(1.7)
    assert not passes
    for broken in ("", "[]", '{"round": {"1": 1}, "draft": {"1": 1}}', '{"round": {"1": -1, "2": 1}, "draft": {}}'):
        kept.write_text(broken)
        assert local_payoff(runtime, profile_of(runtime)).rounds[8] == pytest.approx(1.7)
        assert passes
        passes.clear()
    local_payoff(runtime, profile_of(runtime, DraftPath(SkipSet((1,), (1,)))))
    assert passes, "another path is measured apart"


@pytest.mark.parametrize(("context", "widest"), [(4, None), (10, 2), (16, 4), (40, 8)])
def test_a_short_context_is_timed_as_far_as_it_goes(passes, context, widest):
    model = small()
    model.config.max_position_embeddings = context
    runtime = LeanRuntime(model)
    told = profile_of(runtime)
    found = local_payoff(runtime, told)
    if widest is None:
        assert found is None
        priced = profile_of(runtime, costs=COSTS)
        assert local_payoff(runtime, priced) == priced.payoff
        return
    assert found.rounds[widest] == pytest.approx(1 + (widest - 1) / 10)
    assert max(passes) == widest


@pytest.mark.parametrize("routed", [False, True])
def test_it_is_known_before_the_first_text_with_a_seed(passes, model, routed):
    """By a profile that says that drafts are next to free, where each here costs more than it can bring."""
    llm = LLM(model, selfspec.load("builtin", profile="none").tokenizer)
    profile = profile_of(llm.runtime, costs=COSTS)
    llm._use(profile.with_alternatives([profile]) if routed else profile)
    guard = llm.drafter.routes[0].drafter if routed else llm.drafter
    assert isinstance(guard, Guard)
    llm.generate([1, 2, 3], max_new_tokens=4)
    assert guard.payoff.rounds[8] == pytest.approx(1.01)
    llm.generate([1, 2, 3], max_new_tokens=4, temperature=0.8, seed=1)
    assert guard.payoff.rounds[8] == pytest.approx(1.7)
    passes.clear()
    llm.generate([1, 2, 3], max_new_tokens=4, temperature=0.8, seed=2)
    assert max(passes) < 8, "it is not measured again"


def test_what_has_no_guard_asks_nothing():
    calibrate(PlainDrafter())
    calibrate(Router([Route(PlainDrafter(), PayoffModel())]))
    calibrate(Guard(PlainDrafter()))


def test_costs_are_measured_in_rounds_on_the_host_where_rounds_run_on_the_device(monkeypatch):
    """Else no draft would be timed, and each would seem to cost nothing."""
    monkeypatch.setenv("SELFSPEC_DEVICE_ROUND", "1")
    monkeypatch.setattr(local_costs, "measure_shares", measure_shares)
    runtime = device(small(11, seed=2))
    assert runtime.device_rounds is not None
    shares = local_costs.measure_shares(runtime, PATH)
    assert shares["draft"][1] > 0
    assert len(shares["round"]) > 1
