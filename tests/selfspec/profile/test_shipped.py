"""Ways of decoding by their names."""

from __future__ import annotations

import pytest

from selfspec.basics.errors import SelfspecError
from selfspec.measure.bench_methods import METHODS
from selfspec.profile.draft_spec import LayerSkipSpec, ProposerSpec, Skip
from selfspec.profile.drafter_specs import ModelSpec
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import by_method
from selfspec.types.costs import CostModel
from selfspec.types.identity import Identity
from selfspec.types.methods import FREE, OWN

MODEL = Identity(layers=4)
COSTS = CostModel(context=9, base=0.4, attention=0, mlp=0, widths=[1, 2], verify=[0.9, 1.0], round=0.1)
PATH = LayerSkipSpec(skip=Skip(attention=[1]), proposers=[ProposerSpec(kind="store", path="x.store")])
PROFILE = Profile(model=MODEL, draft=PATH, costs=COSTS)


def test_what_each_drafts():
    drafts = {name: by_method(name, PROFILE, MODEL).draft for name in OWN}
    assert {name: draft.kind for name, draft in drafts.items()} == {
        "plain": "plain",
        "profile": "layer-skip",
        "path": "layer-skip",
        "early-exit": "layer-skip",
        "lookup": "lookup",
        "recycle": "recycle",
        "input": "input",
        "jacobi": "jacobi",
        "gauss-seidel": "jacobi",
        "hybrid-jacobi": "jacobi",
        "lookahead": "lookahead",
        "swift": "swift",
        "clasp": "clasp",
    }
    assert len({str(draft) for draft in drafts.values()}) == len(OWN)
    assert drafts["profile"] == PATH
    assert drafts["path"] == LayerSkipSpec(skip=Skip(attention=[1]))
    assert drafts["early-exit"].skip == Skip(attention=[2, 3], mlp=[2, 3])
    assert by_method("model:small", None, MODEL).draft == ModelSpec(model="small")
    assert by_method("staged:small", None, MODEL).draft == ModelSpec(model="small", proposers=[ProposerSpec()])
    assert drafts["lookup"].proposers == PATH.proposers
    assert drafts["hybrid-jacobi"].method == "hybrid"


def test_costs_are_the_profiles():
    for name in FREE:
        assert by_method(name, PROFILE, MODEL).costs == COSTS
        assert by_method(name, None, MODEL).costs is None


@pytest.mark.parametrize("name", ["profile", "path"])
def test_a_draft_path_needs_a_profile(name):
    for profile in (None, Profile(model=MODEL)):
        with pytest.raises(SelfspecError, match=f"method '{name}' needs a profile that drafts"):
            by_method(name, profile, MODEL)


@pytest.mark.parametrize("name", ["hf", "model:", "magic"])
def test_unknown_names(name):
    with pytest.raises(
        SelfspecError, match=f"method '{name}' is not known; known: plain, profile, path, early-exit, lookup"
    ):
        by_method(name, PROFILE, MODEL)


def test_a_benchmark_runs_them_all():
    assert set(OWN) <= set(METHODS)


def test_another_draft_keeps_nothing_that_was_found_out_about_this_one():
    searched = PROFILE.model_copy(
        update={
            "measured": ["of the path"],
            "predicted": "of the path",
            "search": "of the path",
            "note": "of the path",
            "parts": {"int4": "of the path"},
        }
    )
    assert by_method("recycle", searched, MODEL) == by_method("recycle", PROFILE, MODEL)
    alone = by_method("path", searched, MODEL)
    assert (alone.measured, alone.predicted) == ([], None)
    assert (alone.search, alone.parts) == (searched.search, searched.parts)
